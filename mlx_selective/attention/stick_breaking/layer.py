"""Stick-breaking attention in a layer of an mlx-lm model."""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import BatchKVCache

from ...errors import UserError
from ..heads import tile_heads, untile_heads
from ..method import AttentionMethod, LayerCall
from .definition import (
    bias_remainder,
    normalise_heads,
    stick_breaking_attention,
    value_remainder,
)

REMAINDERS = ("none", "value", "head_bias", "head_bias_norm")
GROUPINGS = ("interleaved", "tiled")


class HeadNorm(nn.Module):
    """GroupNorm of the attention output, one group a head.

    Args:
        heads: query heads H.
        size: size Dv of a value.

    Parameters: ``weight`` and ``bias`` (H * Dv,).
    """

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.weight = mx.ones((heads * size,))
        self.bias = mx.zeros((heads * size,))

    def __call__(self, x: mx.array) -> mx.array:
        """(B, H, T, Dv) in any floating dtype to (B, H, T, Dv) in float32."""
        return normalise_heads(x, self.weight, self.bias)


class StickBreakingCall(LayerCall):
    """Every query breaks a fresh stick, so the state is a plain KV cache.

    Attributes:
        begins: (B,), the first key of each row behind its left padding, where ``mask`` says
            nothing of it; else None.
    """

    begins = None

    def make_mask(self, x):
        # Its mask hides later keys and left padding, no more (a subclass's may): right padding
        # comes behind a row's tokens, and is left padding once the cache's finalize has run.
        if type(self.cache) is BatchKVCache:
            self.begins = self.cache.left_padding
            return None
        return super().make_mask(x)

    def rotate(self, rope, x, *args, **kwargs):
        return x  # stick-breaking has no position embedding

    def attend(self, queries, keys, values, scale):
        if hasattr(self.cache, "max_size"):
            raise UserError(
                "stick_breaking reads keys in their order, and a rotating KV cache does not keep "
                "it; leave out max_kv_size."
            )
        if hasattr(self.cache, "bits"):
            kinds = {"group_size": self.cache.group_size, "bits": self.cache.bits}
            keys, values = mx.dequantize(*keys, **kinds), mx.dequantize(*values, **kinds)
        remainder_form, key_heads = self.method.remainder, keys.shape[1]
        tiled = self.method.grouping == "tiled"
        output, remainder = stick_breaking_attention(
            untile_heads(queries, key_heads) if tiled else queries,
            keys,
            values,
            scale=scale,
            attend_current=self.method.attend_current,
            # Not an array: plain causality, which the method sees to itself.
            mask=self.mask if isinstance(self.mask, mx.array) else None,
            begins=self.begins,
            # Nothing is rounded before a remainder is in.
            output_dtype=None if remainder_form == "none" else mx.float32,
        )
        if remainder_form == "value":
            output = output + value_remainder(remainder, values[:, :, -queries.shape[2] :])
        if tiled:
            output, remainder = (tile_heads(part, key_heads) for part in (output, remainder))
        if "head_bias" in self.attention:
            output = output + bias_remainder(remainder, self.attention.head_bias)
        if "head_norm" in self.attention:
            output = self.attention.head_norm(output)
        return output.astype(queries.dtype)


@dataclass(frozen=True)
class StickBreaking(AttentionMethod):
    """Stick-breaking; the remainder of each stick is dropped, or goes to something.

    Args:
        attend_current: whether a token's own key takes the first share of its stick.
        remainder: what is added to the output for what is left of a stick: "none"; "value", the
            token's own value; "head_bias", a learned vector of each head; "head_bias_norm", that
            vector, and then every head is normalised.
        grouping: which of Hkv key heads the query head h of H reads: "interleaved",
            h // (H / Hkv), or "tiled", h % Hkv.
    """

    kind = "stick_breaking"
    call = StickBreakingCall
    own_parameters = ("head_bias", "head_norm")

    attend_current: bool = False
    remainder: str = "none"
    grouping: str = "interleaved"

    def __post_init__(self):
        if not isinstance(self.attend_current, bool):
            raise UserError(
                f"attention.attend_current must be true or false, got {self.attend_current!r}."
            )
        for name, allowed in (("remainder", REMAINDERS), ("grouping", GROUPINGS)):
            value = getattr(self, name)
            if value not in allowed:
                raise UserError(
                    f"attention.{name} must be one of {', '.join(allowed)}, got {value!r}."
                )

    def check(self, attention, shape):
        if shape.scaled_by_position:
            raise UserError(
                "stick_breaking has no position embedding, and the model of "
                f"{type(attention).__name__} scales queries by their position."
            )
        if not shape.rotated:
            raise UserError(
                "stick_breaking has no position embedding, and the positions of "
                f"{type(attention).__name__} do not come from RoPE, where they could be left out."
            )

    def install(self, attention, shape):
        if self.remainder in ("head_bias", "head_bias_norm"):
            attention.head_bias = mx.zeros((shape.heads, shape.value_size))
        if self.remainder == "head_bias_norm":
            attention.head_norm = HeadNorm(shape.heads, shape.value_size)
