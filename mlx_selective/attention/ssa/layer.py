"""Selective self-attention (SSA) in a layer of an mlx-lm model."""

from dataclasses import dataclass, fields

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from ...errors import UserError
from ..method import AttentionMethod, LayerCall
from .definition import (
    apply_temperature,
    position_temperature,
    released_position_temperature,
    token_temperature,
)

#: sigmoid(-20) * ln n vanishes beside 1 in float32: a fresh temperature changes nothing, yet
#: has a gradient (of the order 1e-9: an optimiser that scales by it, such as Adam, moves it).
FRESH_ALPHA = -20.0
#: exp(-exp(3)) is 2e-9, the same for the released form.
FRESH_BETA = 3.0

POSITION_FORMS = ("alpha", "beta")


class Temperature(nn.Module):
    """One temperature of a layer: tanh(W x) + 1 + position part, per head.

    Args:
        heads: number of heads H (query heads, or key heads for values).
        features: size C of the layer's input.
        settings: which parts exist and in which form.

    Parameters: ``weight`` (H, C) if token-aware; ``alpha`` (H,) or ``beta`` () if
    position-aware. Fresh ones give 1.
    """

    def __init__(self, heads: int, features: int, settings: "SSA"):
        super().__init__()
        if settings.token_aware:
            self.weight = mx.zeros((heads, features))
        if settings.position_aware and settings.position_form == "alpha":
            self.alpha = mx.full((heads,), FRESH_ALPHA)
        elif settings.position_aware:
            self.beta = mx.array(FRESH_BETA)

    def __call__(self, x: mx.array, count: mx.array) -> mx.array:
        """The temperature (B, H, T) for x (B, T, C) and ``count`` visible keys (T,) or (B, T)."""
        temperature = mx.array(1.0)
        if "alpha" in self:
            temperature = position_temperature(count, self.alpha)
        elif "beta" in self:
            temperature = released_position_temperature(count, self.beta)
        if "weight" in self:
            temperature = temperature + token_temperature(x, self.weight)
        return temperature


class SSACall(LayerCall):
    """Tempers values before the cache stores them, and queries before stock attention."""

    def __init__(self, method, attention, x, cache):
        super().__init__(method, attention, x, cache)
        count = mx.array(self.offset)[..., None] + mx.arange(1, x.shape[1] + 1)
        # Left padding stands at negative positions; any finite temperature will do there.
        count = mx.maximum(count, 1)
        self.query_temperature = attention.query_temperature(x, count) if method.query else None
        self.value_temperature = attention.value_temperature(x, count) if method.value else None

    def update_and_fetch(self, keys, values):
        return super().update_and_fetch(keys, apply_temperature(values, self.value_temperature))

    def attend(self, queries, keys, values, scale):
        queries = apply_temperature(queries, self.query_temperature)
        return scaled_dot_product_attention(
            queries, keys, values, cache=self.cache, scale=scale, mask=self.mask
        )


@dataclass(frozen=True)
class SSA(AttentionMethod):
    """Temperatures that multiply queries and values.

    Args:
        query: queries have a temperature.
        value: values have one; the cache stores tempered values.
        token_aware: the part tanh(W x) exists.
        position_aware: the part that grows with ln n exists.
        position_form: "alpha", sigmoid(alpha) per head (the paper), or "beta",
            exp(-exp(beta)) per layer (the released code).
    """

    kind = "ssa"
    call = SSACall

    query: bool = True
    value: bool = True
    token_aware: bool = True
    position_aware: bool = True
    position_form: str = "alpha"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise UserError(f"attention.{field.name} must be true or false, got {value!r}.")
        if self.position_form not in POSITION_FORMS:
            raise UserError(
                f"attention.position_form must be one of {', '.join(POSITION_FORMS)}, "
                f"got {self.position_form!r}."
            )

    def install(self, attention, args):
        heads = args.num_attention_heads
        kv_heads = getattr(args, "num_key_value_heads", None) or heads
        if self.query:
            attention.query_temperature = Temperature(heads, args.hidden_size, self)
        if self.value:
            attention.value_temperature = Temperature(kv_heads, args.hidden_size, self)
