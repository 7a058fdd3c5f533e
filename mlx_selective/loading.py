"""Opening a model folder or a Hub id."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .attention import method_from_dict
from .errors import UserError
from .files import check_safetensors, find_folder, one_line, read_json
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
    folder = find_folder(
        str(path_or_hf_repo), lambda repo: mlx_lm_utils._download(repo, revision=revision)
    )
    config = _read_config(folder)
    try:
        overrides = _overrides(config, budget)
        if config.get("model_type") == MODEL_TYPE:
            model, config = mlx_lm_utils.load_model(
                folder,
                lazy,
                model_config=overrides,
                get_model_classes=lambda config: (Model, ModelArgs),
            )
        else:
            model, config = mlx_lm_utils.load_model(folder, lazy)
        if "quantization" in config and mx.default_device() == mx.cpu:
            # MLX's CPU multiplies quantised weights 8 times faster in float32 than in bfloat16, 36
            # times faster than in float16; only scales, norms and activations grow.
            model.set_dtype(mx.float32)
        if adapter_path is not None:
            model = mlx_lm_utils.load_adapters(model, adapter_path)
            model.eval()
        tokenizer = open_tokenizer(folder, tokenizer_config, config.get("eos_token_id"))
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None
    except Exception as error:  # a damaged folder: mlx-lm and transformers tell it in many ways
        raise UserError(f"{folder} cannot be loaded: {one_line(error)}") from error
    return model, tokenizer


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
        return mlx_lm_utils.load_tokenizer(folder, tokenizer_config, eos_token_ids=eos_token_ids)


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


def _read_config(folder: Path) -> dict[str, Any]:
    """config.json of a folder whose weights are there and whole."""
    config = read_json(folder / "config.json")
    if config.get("model_type") != MODEL_TYPE and config.get("model_file") is not None:
        raise UserError(
            f"{folder / 'config.json'}: model_file {config['model_file']!r} is code of the folder, "
            "which is never run here; use mlx-lm with --trust-remote-code."
        )
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no model*.safetensors; convert the checkpoint first "
            "(mlx-selective convert --hf-path ... --mlx-path ...)."
        )
    for file in files:
        check_safetensors(file)
    return config


def _overrides(config: dict[str, Any], budget: int | list[int] | None) -> dict[str, Any]:
    """What replaces fields of config.json: never its model_file, and the budget if given."""
    overrides: dict[str, Any] = {"model_file": None}
    if budget is None:
        return overrides
    if config.get("model_type") != MODEL_TYPE:
        raise UserError(
            f"a budget needs a model with selective attention; this one is "
            f"{config.get('model_type')!r} (convert with --attention selective)."
        )
    method = method_from_dict(config.get("attention")).with_budget(budget)
    return {**overrides, "attention": method.to_dict()}
