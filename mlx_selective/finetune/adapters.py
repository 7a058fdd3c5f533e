"""Adapters with the parameters of attention methods in them, which mlx-lm's loader refuses."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from ..attention import method_from_dict
from ..errors import UserError
from ..files import check_safetensors, read_json
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
    config = SimpleNamespace(**read_json(folder / CONFIG))
    kind = getattr(config, "fine_tune_type", "lora")
    file = folder / WEIGHTS
    check_safetensors(file)
    if kind in ("lora", "dora"):
        linear_to_lora_layers(
            model, config.num_layers, config.lora_parameters, use_dora=kind == "dora"
        )
    weights = mx.load(str(file))
    parameters = dict(tree_flatten(model.parameters()))
    own = set(own_names(model))
    for name, value in weights.items():
        fits = kind == "full" or name in own or name.rsplit(".", 1)[-1] in _LEAVES
        if name not in parameters or not fits:
            raise UserError(f"{file}: {name} is no parameter of an adapter of this model.")
        if value.shape != parameters[name].shape:
            raise UserError(
                f"{file}: {name} has shape {value.shape}, here it is {parameters[name].shape}."
            )
    model.load_weights(list(weights.items()), strict=False)
    attention = getattr(config, "attention", None)
    if attention is not None:
        model.exchange_attention(method_from_dict(attention))
    return model


def save_config(config: dict[str, Any], path: str | Path) -> None:
    """adapter_config.json, whole or not at all."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(config, indent=4, sort_keys=True) + "\n", encoding="utf-8")
    partial.replace(path)
