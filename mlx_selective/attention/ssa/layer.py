"""Selective self-attention (SSA) in a layer of an mlx-lm model."""

from dataclasses import dataclass, fields

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ...errors import UserError
from ..method import AttentionMethod, LayerCall
from .definition import apply_temperature
from .temperature import POSITION_MAPS, SHARED_MAPS, TOKEN_MAPS, Temperature

#: what can have a temperature
PARTS = ("query", "key", "value")


class SSACall(LayerCall):
    """Tempers keys and values before the cache stores them, queries before stock attention.

    Both come after RoPE and after every norm, wherever a family has those.
    """

    def __init__(self, method, attention, x, cache):
        super().__init__(method, attention, x, cache)
        self.x = x
        count = mx.array(self.offset)[..., None] + mx.arange(1, x.shape[1] + 1)
        # Left padding stands at negative positions; any finite temperature will do there.
        self.count = mx.maximum(count, 1)
        #: "query" and "key" -> what is turned, before it is
        self.projected: dict[str, mx.array] = {}

    def rotate(self, rope, x, *args, **kwargs):
        # The queries come first, then the keys: SSA.check has looked.
        self.projected["key" if "query" in self.projected else "query"] = x
        return super().rotate(rope, x, *args, **kwargs)

    def update_and_fetch(self, keys, values):
        return super().update_and_fetch(self._temper("key", keys), self._temper("value", values))

    def attend(self, queries, keys, values, scale):
        return scaled_dot_product_attention(
            self._temper("query", queries),
            keys,
            values,
            cache=self.cache,
            scale=scale,
            mask=self.mask,
        )

    def _temper(self, part: str, x: mx.array) -> mx.array:
        """x (B, H, T, D) times the layer's temperature of that part, if it has one."""
        if not getattr(self.method, part):
            return x
        temperature = getattr(self.attention, f"{part}_temperature")
        # Values, and all three in a layer without RoPE, are the projections themselves.
        projected = self.projected.get(part, x)
        return apply_temperature(x, temperature(self.x, projected, self.count))


@dataclass(frozen=True)
class SSA(AttentionMethod):
    """Temperatures that multiply queries, keys and values. README.md has the formulas.

    Args:
        query: queries have a temperature.
        key: keys have one; the cache stores tempered keys.
        value: values have one; the cache stores tempered values.
        token_map: what a token's own content asks for: "none", "linear", "mlp",
            "weight_sharing" or "feature_sharing".
        position_map: what grows with ln n: "none", "alpha" (sigmoid(alpha) per head, the
            paper) or "beta" (exp(-exp(beta)) per layer, the released code).

    Raises:
        UserError: if a setting is none of these, or if nothing would be tempered.
    """

    kind = "ssa"
    call = SSACall
    own_parameters = float32_parameters = ("temperature",)

    query: bool = True
    key: bool = False
    value: bool = True
    token_map: str = "linear"
    position_map: str = "alpha"

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (bool, "bool") and not isinstance(value, bool):
                raise UserError(f"attention.{field.name} must be true or false, got {value!r}.")
        for name, maps in (("token_map", TOKEN_MAPS), ("position_map", POSITION_MAPS)):
            value = getattr(self, name)
            if value not in maps:
                raise UserError(
                    f"attention.{name} must be one of {', '.join(maps)}, got {value!r}."
                )
        if self.token_map == self.position_map == "none":
            raise UserError(
                "attention.token_map and attention.position_map are both none, so that no "
                "temperature would differ from 1; one of them must be something else."
            )
        if not any(getattr(self, part) for part in PARTS):
            raise UserError(
                f"one of attention.{', attention.'.join(PARTS)} must be true; "
                "otherwise this is kind softmax."
            )

    def check(self, attention, shape):
        super().check(attention, shape)
        reads_projections = self.token_map in SHARED_MAPS and (self.query or self.key)
        if reads_projections and not shape.shows_projections:
            raise UserError(
                f"attention.token_map {self.token_map} reads queries and keys before RoPE, where "
                f"{type(attention).__name__} does not show them; none, linear and mlp can be used."
            )

    def install(self, attention, shape):
        sizes = {
            "query": (shape.heads, shape.head_size),
            "key": (shape.key_heads, shape.head_size),
            "value": (shape.key_heads, shape.value_size),
        }
        for part, (heads, size) in sizes.items():
            if getattr(self, part):
                attention[f"{part}_temperature"] = Temperature(
                    heads, shape.features, size, self.token_map, self.position_map
                )
