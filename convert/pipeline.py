"""The conversion: source, layout, weights, then a whole folder."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path
from mlx_lm.utils import quantize_model, save_config, save_model

from ..attention import SSA, Selective, method_from_dict
from ..errors import UserError
from ..model import MODEL_FILE, MODEL_FILE_TEXT, MODEL_TYPE, Model, ModelArgs
from .folder import check_free, whole_folder
from .layouts import Layout, find_layout
from .source import fetch_weights, find_folder, read_json, read_tensors, weight_files
from .tokenizer import end_tokens, write_tokenizer
from .weights import map_weights

DTYPES = ("float16", "bfloat16", "float32")

#: config.json's sizes are bounded before anything is built from them.
_BOUNDS = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1_000,
    "num_key_value_heads": 1_000,
    "head_dim": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
}


def convert(
    hf_path: str,
    mlx_path: str | Path = "mlx_model",
    *,
    attention: str | None = None,
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
        hf_path: folder or Hub id of the checkpoint.
        mlx_path: folder to write; must not exist. It appears only when whole.
        attention: kind of attention the checkpoint was trained with, where its config.json
            does not tell; default softmax.
        budget: keys a layer keeps, written to the config (selective attention only).
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
    folder = find_folder(hf_path, revision)
    source_config = read_json(folder / "config.json")
    layout = find_layout(source_config)
    config = _target_config(layout, source_config, attention, budget)
    model = Model(ModelArgs(config))
    fetch_weights(hf_path, revision)
    print("[INFO] Loading", flush=True)
    _load(model, layout, folder, config, source_config)
    dtype = dtype or config.get("torch_dtype") or config.get("dtype")
    if dtype in DTYPES:
        _cast(model, dtype)
        config["torch_dtype"] = dtype
    if quantize:
        print("[INFO] Quantizing", flush=True)
        model, config = _quantize(model, config, q_group_size, q_bits, q_mode)
    with whole_folder(mlx_path) as partial:
        write_tokenizer(folder, partial)
        config["eos_token_id"] = end_tokens(folder, config, partial)
        save_config(config, partial / "config.json")
        (partial / MODEL_FILE).write_text(MODEL_FILE_TEXT, encoding="utf-8")
        save_model(partial, model, donate_model=True)
    return mlx_path


def _target_config(
    layout: Layout, source: dict[str, Any], kind: str | None, budget: int | None
) -> dict[str, Any]:
    """config.json of the converted model."""
    if "quantization_config" in source or "quantization" in source:
        raise UserError("config.json: the checkpoint is quantised; convert the original weights.")
    config = layout.config(source)
    for name, bound in _BOUNDS.items():
        size = config.get(name)
        if size is None:
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= bound:
            raise UserError(f"config.json: {name} must be from 1 to {bound}, got {size!r}.")
    attention = _attention(layout, source, kind)
    if budget is not None:
        if attention["kind"] != Selective.kind:
            raise UserError(f"--budget needs selective attention; this is {attention['kind']}.")
        attention["budget"] = budget
    return {
        **config,
        "model_type": MODEL_TYPE,
        "base_model_type": layout.base_model_type,
        "model_file": MODEL_FILE,
        "attention": method_from_dict(attention).to_dict(),
    }


def _attention(layout, source, kind):
    """The attention settings: what the source says, or else what the user says."""
    told = layout.attention(source)
    if told is None:
        return {"kind": kind or "softmax"}
    if kind not in (None, told["kind"]):
        raise UserError(
            f"--attention {kind}: this checkpoint was trained with {told['kind']} attention."
        )
    return told


def _load(model, layout, folder, config, source_config):
    """Reads the checkpoint into the model."""
    # A softmax checkpoint taken to SSA starts from temperatures that change nothing.
    untold = layout.attention(source_config) is None
    fresh = ("temperature",) if config["attention"]["kind"] == SSA.kind and untold else ()
    try:
        tensors = read_tensors(weight_files(folder))
        weights = map_weights(layout, tensors, model, config["num_attention_heads"], fresh=fresh)
    except UserError as error:
        prefix = "" if str(folder) in str(error) else f"{folder}: "
        raise UserError(f"{prefix}{error}") from None
    model.load_weights(list(weights.items()), strict=not fresh)


def _cast(model: nn.Module, dtype: str) -> None:
    """Casts as mlx_lm.convert does: temperatures stay float32."""
    print("[INFO] Using dtype:", dtype, flush=True)
    target, castable = getattr(mx, dtype), model.cast_predicate

    def cast(path, value):
        if castable(path) and mx.issubdtype(value.dtype, mx.floating):
            return value.astype(target)
        return value.astype(mx.float32)

    model.update(tree_map_with_path(cast, model.parameters()))


def _quantize(model, config, group_size, bits, mode):
    try:
        return quantize_model(model, config, group_size, bits, mode=mode)
    except ValueError as error:
        raise UserError(f"quantising failed: {str(error).splitlines()[0]}") from None
