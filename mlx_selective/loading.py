"""Opening a model folder or a Hub id."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _download, load_model, load_tokenizer

from .attention import method_from_dict
from .errors import UserError
from .files import check_safetensors, find_folder, one_line, read_json
from .finetune.adapters import load_adapters
from .model import MODEL_TYPE, Model, ModelArgs


def load(
    path_or_hf_repo: str | Path,
    budget: int | list[int] | None = None,
    *,
    tokenizer_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    revision: str | None = None,
) -> tuple[nn.Module, TokenizerWrapper]:
    """Loads a model and its tokenizer; no code from the folder is run.

    Args:
        path_or_hf_repo: a folder that ``mlx-selective convert`` wrote, or its Hub id. Folders
            of stock mlx-lm models open too, with their own attention.
        budget: keys that each layer keeps (an int, or one a layer), instead of the budget in
            config.json. Only for selective attention.
        tokenizer_config: passed to mlx-lm's tokenizer loader.
        adapter_path: LoRA adapters, as in mlx_lm.load.
        lazy: leave the weights unread until they are used.
        revision: branch, tag or commit on the Hub.

    Returns:
        The model and the tokenizer, as mlx_lm.load returns them. Quantised models compute in
        float32 on the CPU, whatever dtype their scales are stored in.

    Raises:
        UserError: if the folder is missing, incomplete or damaged, or cannot be pruned.
    """
    folder = model_folder(path_or_hf_repo, revision)
    model, config = open_model(folder, lazy, budget=budget)
    if adapter_path is not None:
        model = open_adapters(model, adapter_path)
    with _told_of(folder):
        tokenizer = open_tokenizer(folder, tokenizer_config, config.get("eos_token_id"))
    return model, tokenizer


def model_folder(
    path_or_hf_repo: str | Path, revision: str | None = None, allow_patterns: Any = None
) -> Path:
    """The local folder of a model, downloaded first if it is a Hub id.

    Raises:
        UserError: if there is no such folder, or the Hub does not give it.
    """
    options = {"revision": revision, "allow_patterns": allow_patterns}
    return find_folder(str(path_or_hf_repo), lambda repo: _download(repo, **options))


def open_model(
    folder: Path,
    lazy: bool = False,
    *,
    strict: bool = True,
    budget: int | list[int] | None = None,
    model_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    keep_dtype: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """mlx-lm's ``load_model``, for our folders without running their code.

    Args:
        folder: a local folder.
        lazy, strict: as in mlx-lm.
        budget: keys that each layer keeps, instead of the budget in config.json.
        model_config: replaces fields of config.json.
        trust_remote_code: run the ``model_file`` of a folder that is not ours.
        keep_dtype: leave a quantised model as it is stored, on the CPU too.

    Returns:
        The model, and its config.json as mlx-lm gives it.

    Raises:
        UserError: if the folder is incomplete or damaged, or cannot be pruned.
    """
    source = _read_config(folder, strict, trust_remote_code)
    options: dict[str, Any] = {"strict": strict, "model_config": dict(model_config or {})}
    with _told_of(folder):
        if budget is not None:
            options["model_config"]["attention"] = _attention(source, budget)
        if source.get("model_type") == MODEL_TYPE:
            options["model_config"]["model_file"] = None
            options["get_model_classes"] = lambda config: (Model, ModelArgs)
        elif trust_remote_code and "trust_remote_code" in inspect.signature(load_model).parameters:
            options["trust_remote_code"] = True  # mlx-lm 0.31 asks nobody
        model, config = load_model(folder, lazy, **options)
        if "model_file" in source:  # fuse writes the config again
            config["model_file"] = source["model_file"]
        if "quantization" in config and mx.default_device() == mx.cpu and not keep_dtype:
            # MLX's CPU multiplies quantised weights 8 times faster in float32 than in bfloat16, 36
            # times faster than in float16; only scales, norms and activations grow.
            model.set_dtype(mx.float32)
    return model, config


def open_adapters(model: nn.Module, adapter_path: str | Path) -> nn.Module:
    """Puts an adapter into a model, as mlx-lm's ``load_adapters``.

    Raises:
        UserError: if the adapters are missing, damaged, or made for another model.
    """
    try:
        model = load_adapters(model, adapter_path)
    except UserError as error:
        raise UserError(f"{adapter_path}: no adapter of this model: {error}") from None
    except Exception as error:  # whatever mlx-lm makes of another model's or a damaged one
        raise UserError(f"{adapter_path}: no adapter of this model: {one_line(error)}") from error
    model.eval()
    return model


def open_tokenizer(
    folder: Path,
    tokenizer_config: dict[str, Any] | None = None,
    eos_token_ids: int | list[int] | None = None,
) -> TokenizerWrapper:
    """mlx-lm's tokenizer of a folder, none of whose code is run.

    Raises:
        Exception: whatever mlx-lm and transformers make of a damaged one.
    """
    # Left to itself, transformers asks at the terminal whether to run a folder's code.
    tokenizer_config = {"trust_remote_code": False, **(tokenizer_config or {})}
    with _quiet_transformers():
        return load_tokenizer(folder, tokenizer_config, eos_token_ids=eos_token_ids)


@contextmanager
def _told_of(folder: Path) -> Iterator[None]:
    """Tells in one line what is wrong with a folder, whichever way mlx-lm tells it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except Exception as error:
        raise UserError(f"{folder} cannot be loaded: {one_line(error)}") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without the warning that transformers does not know the model_type; it need not."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _read_config(folder: Path, strict: bool, trust_remote_code: bool) -> dict[str, Any]:
    """config.json of a folder whose weights are there and whole."""
    config = read_json(folder / "config.json")
    foreign = config.get("model_type") != MODEL_TYPE and config.get("model_file") is not None
    if foreign and not trust_remote_code:
        raise UserError(
            f"{folder / 'config.json'}: model_file {config['model_file']!r} is code of the folder; "
            "only mlx-lm's tools run it, with --trust-remote-code."
        )
    files = sorted(folder.glob("model*.safetensors"))
    if not files and strict:
        raise UserError(
            f"{folder}: no model*.safetensors; convert the checkpoint first "
            "(mlx-selective convert --hf-path ... --mlx-path ...)."
        )
    for file in files:
        check_safetensors(file)
    return config


def _attention(config: dict[str, Any], budget: int | list[int]) -> Any:
    """The ``attention`` of config.json under another budget."""
    if config.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"a budget needs a model with selective attention; this one is "
            f"{config.get('model_type')!r} (convert with --attention selective)."
        )
    return method_from_dict(config.get("attention")).with_budget(budget).to_dict()
