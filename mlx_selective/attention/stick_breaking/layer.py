"""Stick-breaking attention in a layer of an mlx-lm model."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from ...errors import UserError
from ..method import AttentionMethod, LayerCall
from .definition import stick_breaking_attention


class NoPositions(nn.Module):
    """Stands where RoPE was: stick-breaking has no position embedding."""

    def __call__(self, x, offset=0):
        return x


class StickBreakingCall(LayerCall):
    """Every query breaks a fresh stick, so the state is a plain KV cache."""

    def attend(self, queries, keys, values, scale):
        if hasattr(self.cache, "bits"):
            raise UserError("stick_breaking does not read a quantised KV cache; leave out kv_bits.")
        output, _ = stick_breaking_attention(
            queries,
            keys,
            values,
            scale=scale,
            attend_current=self.method.attend_current,
            # Not an array: plain causality, which the method sees to itself.
            mask=self.mask if isinstance(self.mask, mx.array) else None,
        )
        return output


@dataclass(frozen=True)
class StickBreaking(AttentionMethod):
    """Stick-breaking without remainder.

    Args:
        attend_current: whether a token's own key takes the first share of its stick.
    """

    kind = "stick_breaking"
    call = StickBreakingCall

    attend_current: bool = False

    def __post_init__(self):
        if not isinstance(self.attend_current, bool):
            raise UserError(
                f"attention.attend_current must be true or false, got {self.attend_current!r}."
            )

    def install(self, attention, args):
        if "rope" not in attention:
            raise UserError(
                f"stick_breaking takes RoPE out of a layer, but {type(attention).__name__} "
                "has no part called rope."
            )
        attention.rope = NoPositions()
