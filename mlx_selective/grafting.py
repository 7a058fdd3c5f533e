"""Puts an attention method into mlx-lm's own model, in place of the attention it has.

mlx-lm's attention modules end in one call, ``scaled_dot_product_attention(queries, keys, values,
cache=..., scale=..., mask=...)``, after their own projections, norms and RoPE. A grafted module
runs the same code with two things exchanged: the cache is a :class:`LayerCall`, and that one
function hands over to it. Parameter names, ``sanitize``, quantisation and LoRA stay as they are.
"""

import functools
import types
from typing import Any

import mlx.nn as nn

from .attention import AttentionMethod, method_from_dict
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
        The same model, whose ``make_cache`` gives the method's caches. Everything else stays as
        mlx-lm computes it (for GPT-NeoX that is an approximated GELU; a converted folder, whose
        config tells, computes what it says).

    Raises:
        UserError: if the method or its settings are unknown, or if the model has something
            in its attention that would silently be lost.
    """
    if not isinstance(attention, AttentionMethod):
        attention = method_from_dict(attention)
    _check_graftable(model)
    modules = [_attention_module(layer) for layer in model.layers]
    # Everything that can be refused is refused before anything changes.
    methods = [attention.for_layer(index, len(modules)) for index in range(len(modules))]
    for method, module in zip(methods, modules, strict=True):
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
        run = vars(type(module)).get("__call__")
        if isinstance(run, types.FunctionType) and _INTERCEPTED in run.__code__.co_names:
            return module
    raise UserError(f"{type(layer).__name__} has no part that calls {_INTERCEPTED}.")


class GraftedModel:
    """Mixed into mlx-lm's model class: caches and conversion rules of the method."""

    def make_cache(self, budget: int | list[int] | None = None) -> list[Any]:
        """One empty cache a layer, for mlx_lm.models.cache.make_prompt_cache.

        Args:
            budget: keys that each layer keeps, instead of the model's own budget.

        Raises:
            UserError: if there is a budget, and the attention of this model cannot be pruned.
        """
        method = self.attention if budget is None else self.attention.with_budget(budget)
        layers = len(self.layers)
        return [method.for_layer(index, layers).make_cache() for index in range(layers)]

    @property
    def cast_predicate(self):
        """Temperatures stay in float32 when mlx-lm casts a model, and what the base model keeps."""
        base = getattr(super(), "cast_predicate", lambda path: True)
        return lambda path: "temperature" not in path and base(path)


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
    return type(name, (base,), {"__call__": __call__, "__module__": __name__})


@functools.cache
def _grafted_model(base: type) -> type:
    name = f"Grafted{base.__name__}"
    return type(name, (GraftedModel, base), {"__module__": __name__})


def _hand_over(queries, keys, values, cache, scale, mask, sinks=None):
    """Stands in a grafted layer where mlx-lm's attention function was."""
    if sinks is not None:
        raise UserError("attention sinks cannot be grafted.")
    return cache.attend(queries, keys, values, scale)
