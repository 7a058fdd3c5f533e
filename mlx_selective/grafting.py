"""Puts an attention method into mlx-lm's own model, in place of the attention it has.

mlx-lm's attention modules end in one call, ``scaled_dot_product_attention(queries, keys, values,
cache=..., scale=..., mask=...)``, after their own projections, norms and RoPE. A grafted module
runs the same code with two things exchanged: the cache is a :class:`LayerCall`, and that one
function hands over to it. Parameter names, ``sanitize``, quantisation and LoRA stay as they are.
"""

import functools
import types
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from .attention import AttentionMethod, Selective, method_from_dict
from .errors import UserError

#: mlx-lm model types whose attention is known to keep to the pattern, with nothing else in it.
GRAFTABLE = ("gpt_neox", "granite", "llama")

_INTERCEPTED = "scaled_dot_product_attention"


def graft(model: nn.Module, attention: AttentionMethod | dict[str, Any]) -> nn.Module:
    """Exchanges the attention of every layer of an mlx-lm model, in place.

    Args:
        model: a loaded mlx-lm model, such as ``mlx_lm.load`` returns.
        attention: a method, or config.json's ``attention`` object:
            ``graft(model, {"kind": "selective", "budget": 256})``.

    Returns:
        The same model, whose ``make_cache`` gives the method's caches.

    Raises:
        UserError: if the method or its settings are unknown, or if the model has something
            in its attention that would silently be lost.
    """
    if not isinstance(attention, AttentionMethod):
        attention = method_from_dict(attention)
    _check_graftable(model)
    layers = model.layers
    for index, layer in enumerate(layers):
        method = attention.for_layer(index, len(layers))
        module = _attention_module(layer)
        method.install(module, model.args)
        module.attention_method = method
        module.__class__ = _grafted_attention(type(module))
    model.attention = attention
    model.__class__ = _grafted_model(type(model))
    return model


def _check_graftable(model: nn.Module) -> None:
    model_type = getattr(model, "model_type", type(model).__name__)
    if isinstance(model, GraftedModel):
        raise UserError(f"this model already carries {model.attention.kind} attention.")
    if model_type not in GRAFTABLE:
        raise UserError(
            f"model_type {model_type!r} cannot be grafted yet; expected {', '.join(GRAFTABLE)}."
        )
    if any(getattr(layer, "use_sliding", False) for layer in model.layers):
        raise UserError(
            f"this {model_type} model has sliding-window layers, which a graft would make global."
        )


def _attention_module(layer: nn.Module) -> nn.Module:
    """The part of a decoder layer whose code calls mlx-lm's attention function."""
    for module in layer.children().values():
        if isinstance(module, nn.Module):
            if _INTERCEPTED in type(module).__call__.__code__.co_names:
                return module
    raise UserError(f"{type(layer).__name__} has no part that calls {_INTERCEPTED}.")


class GraftedAttention:
    """Mixed into mlx-lm's attention class of a grafted layer."""


class GraftedModel:
    """Mixed into mlx-lm's model class: caches and conversion rules of the method."""

    def make_cache(self) -> list[Any]:
        """One empty cache a layer, for mlx_lm.models.cache.make_prompt_cache."""
        return [
            module.attention_method.make_cache()
            for layer in self.layers
            for module in layer.children().values()
            if isinstance(module, GraftedAttention)
        ]

    def with_budget(self, budget: int | list[int]) -> list[AttentionMethod]:
        """The methods of all layers under another budget.

        Raises:
            UserError: if the attention of this model cannot be pruned.
        """
        if not isinstance(self.attention, Selective):
            raise UserError(
                f"a budget needs selective attention; this model has {self.attention.kind}."
            )
        method, layers = replace(self.attention, budget=budget), len(self.layers)
        return [method.for_layer(index, layers) for index in range(layers)]

    @property
    def cast_predicate(self):
        """Temperatures stay in float32 when mlx-lm casts a model; everything else is cast."""
        return lambda path: "temperature" not in path


@functools.cache
def _grafted_attention(base: type) -> type:
    """The attention class ``base``, its code bound to LayerCall instead of softmax."""
    original = base.__call__
    scope = {**original.__globals__, _INTERCEPTED: _hand_over}
    run = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    run.__kwdefaults__ = original.__kwdefaults__

    def __call__(self, x, mask=None, cache=None):
        method = self.attention_method
        return run(self, x, None, method.call(method, self, x, cache))

    name = f"Grafted{base.__name__}"
    return type(name, (GraftedAttention, base), {"__call__": __call__, "__module__": __name__})


@functools.cache
def _grafted_model(base: type) -> type:
    name = f"Grafted{base.__name__}"
    return type(name, (GraftedModel, base), {"__module__": __name__})


def _hand_over(queries, keys, values, cache, scale, mask, sinks=None):
    """Stands in a grafted layer where mlx-lm's attention function was."""
    if sinks is not None:
        raise UserError("attention sinks cannot be grafted.")
    return cache.attend(queries, keys, values, scale)
