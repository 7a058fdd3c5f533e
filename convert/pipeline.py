"""The conversion: source, layout, weights, then a whole folder."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import quantize_model, save_config, save_model

from ..attention import AttentionMethod, Softmax, method_from_dict
from ..config_fields import check_fields
from ..errors import UserError
from ..files import one_line, read_json
from ..model import MODEL_FILE, MODEL_FILE_TEXT, MODEL_TYPE, Model, ModelArgs
from .folder import check_free, whole_folder, writing
from .layouts import Layout, find_layout
from .source import fetch_weights, find_checkpoint, read_tensors, weight_files
from .tokenizer import end_tokens, write_tokenizer
from .weights import map_weights

DTYPES = ("float16", "bfloat16", "float32")


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    *,
    attention: str | dict[str, Any] | list[dict[str, Any]] | None = None,
    budget: int | None = None,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    dtype: str | None = None,
    revision: str | None = None,
) -> Path:
    """Converts a PyTorch checkpoint into a model folder for mlx-selective and mlx-lm.

    Args:
        hf_path: folder or Hub id of the checkpoint, or of a model that was converted before, to
            change its dtype, its budget, or quantise it.
        mlx_path: folder to write; must not exist. It appears only when whole.
        attention: attention the checkpoint was trained with, where its config.json does not
            tell: a kind, an object as in config.json (``{"kind": "ssa", "key": True}``), or a
            list with one for each layer; default softmax. Parameters of the attention that the
            checkpoint does not have start afresh.
        budget: keys a layer keeps, written to the config (selective layers only).
        quantize: quantise the weights, with ``q_bits``, ``q_group_size`` and ``q_mode`` as in
            mlx_lm.convert.
        dtype: float16, bfloat16 or float32; default the config's torch_dtype.
        revision: branch, tag or commit on the Hub.

    Returns:
        The folder that was written.

    Raises:
        UserError: on anything wrong with the source or the options; nothing is left behind.
    """
    mlx_path = Path(mlx_path)
    check_free(mlx_path)
    asked = None if attention is None else _asked(attention)
    if quantize:
        _check_quantization(q_group_size, q_bits, q_mode)
    quantization = (q_group_size, q_bits, q_mode) if quantize else None
    folder = find_checkpoint(hf_path, revision)
    source = read_json(folder / "config.json")
    layout = find_layout(source)
    config = _target_config(layout, source, asked, budget)
    model = Model(ModelArgs(config))
    print(f"[INFO] {layout.name}, {model.attention.kind} attention", flush=True)
    fetch_weights(hf_path, revision)
    # Inside, so that whatever is wrong with the source is found before much is read or written.
    with whole_folder(mlx_path) as partial:
        write_tokenizer(folder, partial)
        config["eos_token_id"] = end_tokens(folder, config, partial)
        model = _load(model, layout, folder, config, source)
        if isinstance(attention, dict | list):
            _check_settings(asked, budget, config["attention"])
        _finish(model, config, dtype, quantization, partial, mlx_path)
    return mlx_path


def _asked(attention: Any) -> AttentionMethod:
    """The method that ``--attention`` names or describes."""
    try:
        return method_from_dict({"kind": attention} if isinstance(attention, str) else attention)
    except UserError as error:
        raise UserError(f"--attention: {error}") from None


def _target_config(
    layout: Layout, source: dict[str, Any], asked: AttentionMethod | None, budget: int | None
) -> dict[str, Any]:
    """config.json of the converted model."""
    if source.get("quantization_config") or source.get("quantization"):
        raise UserError("config.json: the checkpoint is quantised; convert the original weights.")
    check_fields(source, layout.field_names)
    config = layout.config(source)
    # It names code files, which are not copied.
    config.pop("auto_map", None)
    method = _attention(layout, source, asked)
    if budget is not None:
        method = method.with_budget(budget)
    return {
        **config,
        "model_type": MODEL_TYPE,
        "base_model_type": layout.base_model_type or config["base_model_type"],
        "model_file": MODEL_FILE,
        "attention": method.to_dict(),
    }


def _attention(layout, source, asked):
    """The attention method: what the source says, or else what the user says."""
    told = layout.attention(source)
    if told is None:
        return asked or Softmax()
    method = method_from_dict(told)
    if asked and asked.kind != method.kind:
        raise UserError(
            f"--attention {asked.kind}: this checkpoint was trained with {method.kind} attention."
        )
    return method


def _check_settings(asked, budget, written):
    """Refuses settings that say something else than the source, its tensors included, told."""
    asked = asked if budget is None else asked.with_budget(budget)
    if asked.to_dict() != written:
        raise UserError(
            f"--attention {json.dumps(asked.to_dict())}: this checkpoint tells its attention, "
            f"{json.dumps(written)}; leave out --attention."
        )


def _load(model, layout, folder, config, source):
    """Reads the checkpoint into the model, or into one that its tensors tell; gives that one."""
    print("[INFO] Loading", flush=True)
    # A checkpoint that tells its attention was trained with it, and has its parameters.
    untold = layout.attention(source) is None
    fresh = model.attention.own_parameters if untold else ()
    try:
        tensors = read_tensors(weight_files(folder))
        told = layout.attention_by_tensors(source, tensors)
        if told:
            config["attention"] = method_from_dict(config["attention"] | told).to_dict()
            model = Model(ModelArgs(config))
        heads = config.get("num_attention_heads")
        weights = map_weights(layout, tensors, model, heads, fresh=fresh)
    except UserError as error:
        prefix = "" if str(folder) in str(error) else f"{folder}: "
        raise UserError(f"{prefix}{error}") from None
    model.load_weights(list(weights.items()), strict=not fresh)
    return model


def _finish(model, config, dtype, quantization, partial, mlx_path):
    """Casts and quantises the model, and writes it beside its tokenizer."""
    _set_dtype(model, config, dtype)
    if quantization:
        print("[INFO] Quantizing", flush=True)
        model, config = _quantize(model, config, *quantization)
    with writing(mlx_path):
        save_config(config, partial / "config.json")
        (partial / MODEL_FILE).write_text(MODEL_FILE_TEXT, encoding="utf-8")
        save_model(partial, model, donate_model=True)


def _set_dtype(model: nn.Module, config: dict[str, Any], dtype: str | None) -> None:
    """Casts the weights to the dtype asked for, or the config's; temperatures to float32."""
    told = config.pop("dtype", None)  # transformers 5's name of torch_dtype
    dtype = dtype or config.get("torch_dtype") or told
    if dtype not in DTYPES:
        return
    print("[INFO] Using dtype:", dtype, flush=True)
    config["torch_dtype"] = dtype
    target, castable = getattr(mx, dtype), model.cast_predicate
    model.update(
        tree_map_with_path(
            lambda path, value: value.astype(target if castable(path) else mx.float32),
            model.parameters(),
        )
    )


def _check_quantization(group_size, bits, mode):
    """Refuses what MLX has no quantization for, before anything is read."""
    given = {"--q-group-size": group_size, "--q-bits": bits}
    for flag, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{flag} must be at least 1, got {value}.")
    try:
        mx.quantize(mx.zeros((1, 128)), group_size, bits, mode)
    except ValueError as error:
        flags = " ".join(f"{flag} {value}" for flag, value in given.items() if value is not None)
        reason = one_line(error).removeprefix("[quantize] ")
        raise UserError(f"--q-mode {mode} {flags}: {reason}") from None


def _quantize(model, config, group_size, bits, mode):
    try:
        model, config = quantize_model(model, config, group_size, bits, mode=mode)
    except ValueError as error:
        raise UserError(f"quantising failed: {one_line(error)}") from None
    if not any(path.endswith(".scales") for path, _ in tree_flatten(model.parameters())):
        # mlx-lm passes over every layer whose width is no multiple of the group size.
        raise UserError(
            f"--q-group-size {config['quantization']['group_size']}: no layer of this model has "
            "a multiple of it as its width; choose a smaller one."
        )
    return model, config
