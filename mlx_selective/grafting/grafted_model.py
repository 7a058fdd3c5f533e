"""Puts an attention method into mlx-lm's own model, in place of the attention it has.

mlx-lm's attention modules end in one call, ``scaled_dot_product_attention(queries, keys, values,
cache=..., scale=..., mask=...)``, after their own projections, norms and RoPE. A grafted layer
runs the same code with three things exchanged for those of a :class:`LayerCall`: its cache, its
``rope``, and that one function. Parameter names, ``sanitize``, quantisation and LoRA stay as they
are, and any family whose attention follows this pattern can be grafted; what would silently be
lost is refused by name (``refusals.py``, and a trial run of each layer in ``trial.py``).
"""

import functools
from typing import Any

import mlx.nn as nn

from ..attention import AttentionMethod, Softmax, method_from_dict
from ..errors import UserError
from .attention_code import INTERCEPTED, AttentionCode, calls_attention
from .refusals import refuse_caches, refuse_config, refuse_parameters
from .trial import model_width, try_out


def graft(
    model: nn.Module, attention: AttentionMethod | dict[str, Any] | list[dict[str, Any]]
) -> nn.Module:
    """Exchanges the attention of every layer of an mlx-lm model, in place.

    Args:
        model: a loaded mlx-lm model, such as ``mlx_lm.load`` returns.
        attention: a method, or what config.json's ``attention`` says:
            ``graft(model, {"kind": "selective", "budget": 256})``, or a list of such objects, one
            a layer.

    Returns:
        The same model, whose ``make_cache`` gives the method's caches. Everything else stays as
        mlx-lm computes it (for GPT-NeoX and GPT-2 that is an approximated GELU; a converted
        folder, whose config tells, computes what it says).

    Raises:
        UserError: if the method or its settings are unknown, or if the model has something
            in its attention that would silently be lost.
    """
    if not isinstance(attention, AttentionMethod):
        attention = method_from_dict(attention)
    if not isinstance(model, nn.Module) or not hasattr(model, "layers"):
        raise UserError(
            "graft takes a model, the first of what mlx_lm.load returns; "
            f"got {type(model).__name__}."
        )
    if isinstance(model, GraftedModel):
        raise UserError(f"this model already carries {model.attention.kind} attention.")
    arguments = getattr(model, "args", None) or getattr(model, "config", None)  # as in plamo3
    config = {} if arguments is None else vars(arguments)
    refuse_config(config)
    refuse_caches(model)
    # Everything that can be refused is refused before anything changes.
    modules = [_attention_module(layer) for layer in model.layers]
    if len({id(module) for module in modules}) < len(modules):
        raise UserError("layers of this model share one attention; a graft needs one for each.")
    width = model_width(config)
    shapes = [try_out(module, width) for module in modules]
    methods = [attention.for_layer(index, len(modules)) for index in range(len(modules))]
    for method, module, shape in zip(methods, modules, shapes, strict=True):
        method.check(module, shape)
    for method, module, shape in zip(methods, modules, shapes, strict=True):
        method.install(module, shape)
        module.attention_method = method
        module.__class__ = _grafted_attention(type(module))
    model.attention = attention
    model.__class__ = _grafted_model(type(model))
    return model


class GraftedModel:
    """Mixed into mlx-lm's model class: caches and conversion rules of the method."""

    def make_cache(self, budget: int | list[int | None] | None = None) -> list[Any]:
        """One empty cache a layer, for mlx_lm.models.cache.make_prompt_cache.

        Args:
            budget: keys that each layer keeps, instead of the model's own budget.

        Raises:
            UserError: if there is a budget, and the attention of this model cannot be pruned.
        """
        method = self.attention if budget is None else self.attention.with_budget(budget)
        layers = len(self.layers)
        return [method.for_layer(index, layers).make_cache() for index in range(layers)]

    def exchange_attention(self, attention: AttentionMethod) -> None:
        """Gives every layer other settings of the method that it has.

        Raises:
            UserError: if they are of another method, or do not fit the layers.
        """
        modules = [_grafted_part(layer) for layer in self.layers]
        methods = [attention.for_layer(index, len(modules)) for index in range(len(modules))]
        for module, method in zip(modules, methods, strict=True):
            if type(module.attention_method) is not type(method):
                raise UserError(
                    f"{method.kind} attention cannot take the place of "
                    f"{module.attention_method.kind} attention in a model that is there."
                )
        for module, method in zip(modules, methods, strict=True):
            module.attention_method = method
        self.attention = attention

    @property
    def cast_predicate(self):
        """What mlx-lm may cast: not the method's float32 parameters, nor what the model keeps."""
        base = getattr(super(), "cast_predicate", lambda path: True)
        kept = self.attention.float32_parameters
        return lambda path: not any(name in path for name in kept) and base(path)

    def shard(self, group: Any = None) -> None:
        """Refuses mlx-lm's tensor parallelism, where each rank would take a head 0 of its own.

        Raises:
            UserError: unless all layers have softmax attention.
        """
        methods = [module.attention_method for module in map(_grafted_part, self.layers)]
        if any(method.kind != Softmax.kind for method in methods):
            raise UserError(f"{self.attention.kind} attention cannot be sharded over its heads.")
        super().shard(group)


def _grafted_part(layer: nn.Module) -> nn.Module:
    """The grafted attention of a decoder layer."""
    return next(m for _, m in layer.named_modules() if hasattr(m, "attention_method"))


def _attention_module(layer: nn.Module) -> nn.Module:
    """The one part of a decoder layer whose code calls mlx-lm's attention function."""
    found = [module for _, module in layer.named_modules() if calls_attention(module)]
    if len(found) != 1:
        raise UserError(
            f"{type(layer).__name__} has {len(found) or 'no'} part{'s' * (len(found) > 1)} that "
            f"call{'s' * (len(found) < 2)} {INTERCEPTED}, so it cannot be grafted."
        )
    refuse_parameters(found[0])
    return found[0]


@functools.cache
def _grafted_attention(base: type) -> type:
    """The attention class ``base``, its code bound to the method's LayerCall."""
    code = AttentionCode(base)

    def __call__(self, *args, **kwargs):
        arguments = code.bind(self, args, kwargs)
        method = self.attention_method
        call = method.call(method, self, arguments[code.input], arguments.get("cache"))
        return code.run(call, arguments)

    def __reduce_ex__(self, protocol):
        return _empty, (_grafted_attention, base), *base.__reduce_ex__(self, protocol)[2:]

    own = {"__call__": __call__, "__reduce_ex__": __reduce_ex__, "__module__": __name__}
    return type(_name(base), (base,), own)


@functools.cache
def _grafted_model(base: type) -> type:
    def __reduce_ex__(self, protocol):
        return _empty, (_grafted_model, base), *base.__reduce_ex__(self, protocol)[2:]

    own = {"__reduce_ex__": __reduce_ex__, "__module__": __name__}
    return type(_name(base), (GraftedModel, base), own)


def _name(base):
    """Such as GraftedLlamaAttention."""
    family = "".join(word.title() for word in base.__module__.rpartition(".")[2].split("_"))
    return f"Grafted{family}{base.__name__}"


def _empty(make_class, base):
    """An object of a class made here, before pickle or copy fills it."""
    made = make_class(base)
    return made.__new__(made)
