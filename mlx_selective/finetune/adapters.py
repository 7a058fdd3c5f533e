"""Adapters with the parameters of attention methods in them, which mlx-lm's loader refuses."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..errors import UserError
from ..files import check_safetensors, read_json
from ..writing import whole_file
from .own_parameters import own_names

WEIGHTS, CONFIG = "adapters.safetensors", "adapter_config.json"
#: mlx-lm's kinds of fine-tuning, and the one that trains an attention method's own parameters alone
FINE_TUNE_TYPES = ("lora", "dora", "full", "temperatures")
#: leaves that LoRA and DoRA layers add
_LEAVES = ("lora_a", "lora_b", "m")


def load_adapters(model: nn.Module, adapter_path: str | Path) -> nn.Module:
    """Puts a fine-tuned adapter into its model, in place, as ``mlx_lm`` does.

    Args:
        model: the model that was fine-tuned.
        adapter_path: the folder of the adapter.

    Returns:
        The model, with LoRA layers, the method's own parameters as trained, and the attention
        settings that training ended with.

    Raises:
        UserError: if a file is missing or damaged, or made for another model.
    """
    folder = Path(adapter_path).expanduser()
    config = read_json(folder / CONFIG)
    kind, file = config.get("fine_tune_type", "lora"), folder / WEIGHTS
    attention = getattr(model, "attention", None)
    made_for = config.get("attention_kind")
    if made_for is not None and attention is not None and attention.kind != made_for:
        raise UserError(
            f"{folder / CONFIG}: made for {made_for} attention, the model has {attention.kind}."
        )
    check_safetensors(file)
    if kind in ("lora", "dora"):
        _add_layers(model, config, folder / CONFIG)
    weights = mx.load(str(file))
    parameters = dict(tree_flatten(model.parameters()))
    own = set(own_names(model))
    lacking = [n for n in parameters if _is_of_adapter(n) and n not in weights]
    if lacking and kind in ("lora", "dora"):
        raise UserError(f"{file}: lacks {lacking[0]} and {len(lacking) - 1} more.")
    for name, value in weights.items():
        fits = kind == "full" or name in own or _is_of_adapter(name)
        if name not in parameters or not fits:
            raise UserError(f"{file}: {name} is no parameter of an adapter of this model.")
        if value.shape != parameters[name].shape:
            raise UserError(
                f"{file}: {name} has shape {value.shape}, here it is {parameters[name].shape}."
            )
    model.load_weights(list(weights.items()), strict=False)
    gain = config.get("attention_gain")
    if gain is not None:
        model.exchange_attention(attention.with_gain(gain))
    return model


def _add_layers(model: nn.Module, config: dict[str, Any], file: Path) -> None:
    """LoRA or DoRA layers as they were trained."""
    for name, kind in (("num_layers", int), ("lora_parameters", dict)):
        if not isinstance(config.get(name), kind):
            raise UserError(f"{file}: {name} is missing or wrong, {config.get(name)!r}.")
    dora = config.get("fine_tune_type") == "dora"
    linear_to_lora_layers(model, config["num_layers"], config["lora_parameters"], use_dora=dora)


def _is_of_adapter(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _LEAVES


def save_weights(weights: dict[str, mx.array], path: Path) -> None:
    """A safetensors file, whole or not at all.

    Args:
        weights: arrays of any shape, by name.
        path: of the file.

    Raises:
        UserError: if it cannot be written.
    """
    with whole_file(path) as file:
        mx.save_safetensors(str(file), weights)


def save_config(config: dict[str, Any], path: Path) -> None:
    """adapter_config.json, whole or not at all.

    Raises:
        UserError: if it cannot be written.
    """
    with whole_file(path) as file:
        file.write_text(json.dumps(config, indent=4, sort_keys=True) + "\n", encoding="utf-8")
