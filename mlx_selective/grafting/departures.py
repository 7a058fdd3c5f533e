"""Where mlx-lm's model of a family departs from the PyTorch model: the config decides here.

mlx-lm writes most activations into its code and leaves the config's fields unread that only few
checkpoints set. A field that asks for something else is either met here or refused by name.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from ..errors import UserError
from .attention_code import names_in_code, with_globals

#: what configs call an activation -> the function of mlx.nn
ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_python"), "gelu"),
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate"), "gelu_approx"),
    **dict.fromkeys(("silu", "swish"), "silu"),
}
#: names by which mlx-lm's feed-forward code calls one of them
_CALLED = {"gelu": "gelu", "gelu_approx": "gelu_approx", "silu": "silu", "swiglu": "silu"}
#: of these, one can take the other's place
_GELUS = {"gelu", "gelu_approx"}


@dataclass(frozen=True)
class Family:
    """What a config of a family says beyond what mlx-lm reads.

    Args:
        activation: fields that may name the activation; the first that is set counts.
        default: the activation where none is set.
        also: names that mean something else in this family than in ``ACTIVATIONS``.
        fixed: field that mlx-lm does not read -> the only value of it that is computed.
    """

    activation: tuple[str, ...] = ("hidden_act",)
    default: str | None = None
    also: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


_GPT2 = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
#: model type -> its departures; of other types, a ``hidden_act`` is compared with the code
FAMILIES = {
    "gpt2": Family(("activation_function",), "gelu_new", fixed=_GPT2),
    "gpt_bigcode": Family(
        ("activation_function",), "gelu_pytorch_tanh", fixed={"scale_attn_weights": True}
    ),
    "gpt_neox": Family(default="gelu"),
    "gptj": Family(("activation_function",), "gelu_new"),
    "phi": Family(default="gelu_new", fixed={"qk_layernorm": False}),
    "starcoder2": Family(default="gelu_pytorch_tanh"),
    # transformers takes this family's "gelu" for the approximation
    "gemma": Family(
        ("hidden_activation", "hidden_act"), "gelu_pytorch_tanh", also={"gelu": "gelu_approx"}
    ),
}
#: fields that change attention in any family, where mlx-lm's ModelArgs do not have them
_UNREAD = {"rope_scaling": None, "partial_rotary_factor": 1, "clip_qkv": None}


def correct_family(model: nn.Module, config: dict[str, Any]) -> None:
    """Makes a fresh mlx-lm model compute what its config says, in place.

    Args:
        model: an mlx-lm model that was built from ``config``.
        config: the whole config.json, with the fields that mlx-lm drops.

    Raises:
        UserError: if the config asks for something that neither mlx-lm nor this computes.
    """
    family = FAMILIES.get(model.model_type, Family())
    args = getattr(model, "args", None)
    unread = {name: value for name, value in _UNREAD.items() if not hasattr(args, name)}
    for name, value in {**unread, **family.fixed}.items():
        given = config.get(name)
        if given is not None and given != value and not _is_default_rope(given):
            raise UserError(
                f"config.json: {name} {given!r} is not computed for {model.model_type}; "
                f"only {value!r} is."
            )
    width, inner = config.get("n_embd"), config.get("n_inner")
    if model.model_type == "gpt2" and inner not in (None, 4 * width):
        raise UserError(f"config.json: n_inner {inner} is not computed for gpt2; only 4 n_embd is.")
    names = [name for name in family.activation if config.get(name) is not None]
    named = config[names[0]] if names else family.default
    if named is not None:
        _set_activation(model, family, names[0] if names else family.activation[0], named)


def _is_default_rope(given):
    """Whether a rope_scaling object asks for no scaling."""
    return isinstance(given, Mapping) and given.get("rope_type", given.get("type")) == "default"


def _set_activation(model, family, field_name, named):
    """Compares the activation that a config names with mlx-lm's code; exchanges one GELU's form."""
    known = {**ACTIVATIONS, **family.also}
    wanted = known.get(named) if isinstance(named, str) else None
    for module, called in list(_activated(model)):
        reachable = _GELUS if called in _GELUS else {_CALLED[called]}
        if wanted not in reachable:
            names = [name for name, function in known.items() if function in reachable]
            raise UserError(
                f"config.json: {field_name} {named!r} is not computed for {model.model_type}; "
                f"expected one of {', '.join(names)}."
            )
        if wanted != _CALLED[called]:
            module.__class__ = _with_gelu(type(module), called, wanted)


def _activated(model):
    """The parts of a model's layers whose code calls an activation, and what they call it."""
    for layer in model.layers:
        for _, module in layer.named_modules():
            for called in _CALLED.keys() & set(names_in_code(module)):
                yield module, called


class _Activations:
    """mlx.nn as a feed-forward part sees it whose GELU is exchanged."""

    def __init__(self, **functions):
        self.__dict__.update(functions)

    def __getattr__(self, name):
        return getattr(nn, name)


@functools.cache
def _with_gelu(base: type, called: str, wanted: str) -> type:
    """The class ``base``, its code calling the other form of GELU."""
    code = with_globals(base.__call__, nn=_Activations(**{called: getattr(nn, wanted)}))
    return type(base.__name__, (base,), {"__call__": code, "__module__": __name__})
