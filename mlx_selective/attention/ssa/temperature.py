"""A temperature of a layer, with its parameters: the token maps and the position maps."""

import mlx.core as mx
import mlx.nn as nn

from .definition import (
    feature_sharing_temperature,
    mlp_temperature,
    position_temperature,
    released_position_temperature,
    token_temperature,
    weight_sharing_temperature,
)

#: the token-aware part; README.md has a formula and a count of parameters for each
TOKEN_MAPS = ("none", "linear", "mlp", "weight_sharing", "feature_sharing")
#: those whose features are the attention's own projections
SHARED_MAPS = ("weight_sharing", "feature_sharing")
#: the position-aware part
POSITION_MAPS = ("none", "alpha", "beta")

#: sigmoid(-20) ln n vanishes beside 1 in float32: a fresh temperature changes nothing (nor does
#: it train, with gradients of the order 1e-9; README.md says what to set for that).
FRESH_ALPHA = -20.0
#: exp(-exp(3)) is 2e-9, the same for the released form.
FRESH_BETA = 3.0


class Temperature(nn.Module):
    """One temperature of a layer: 1 + token part + position part, per head.

    Args:
        heads: number of heads H (query heads, or key heads for keys and values).
        features: size C of the layer's input.
        head_size: size D of what is tempered.
        token_map: one of TOKEN_MAPS.
        position_map: one of POSITION_MAPS.

    Parameters, plain float32 arrays: ``weight``, (H, C) for "linear", (H, D) for "mlp" and
    "weight_sharing", (D,) for "feature_sharing"; ``hidden`` (D, C) for "mlp"; ``alpha`` (H,)
    or ``beta`` ().

    A fresh temperature is 1, and its token part can be trained: ``weight`` starts at zero, which
    tanh passes gradients through, ``hidden`` at random as in nn.Linear.
    """

    def __init__(
        self,
        heads: int,
        features: int,
        head_size: int,
        token_map: str = "linear",
        position_map: str = "alpha",
    ):
        super().__init__()
        self.token_map = token_map
        shapes = {
            "linear": (heads, features),
            "mlp": (heads, head_size),
            "weight_sharing": (heads, head_size),
            "feature_sharing": (head_size,),
        }
        if token_map in shapes:
            self.weight = mx.zeros(shapes[token_map])
        if token_map == "mlp":
            bound = features**-0.5
            self.hidden = mx.random.uniform(-bound, bound, (head_size, features))
        if position_map == "alpha":
            self.alpha = mx.full((heads,), FRESH_ALPHA)
        elif position_map == "beta":
            self.beta = mx.array(FRESH_BETA)

    def __call__(self, x: mx.array, projected: mx.array, count: mx.array) -> mx.array:
        """The temperature of each token.

        Args:
            x: (B, T, C), the layer's input.
            projected: (B, H, T, D), what is tempered, before RoPE.
            count: (T,) or (B, T), the number of keys that each token sees, its own among them.

        Returns:
            float32, (B, H, T), or with the position part alone (B or 1, H or 1, T).
        """
        tau = mx.array(1.0)
        if "alpha" in self:
            tau = position_temperature(count, self.alpha)
        elif "beta" in self:
            tau = released_position_temperature(count, self.beta)
        return tau if self.token_map == "none" else tau + self._token_part(x, projected)

    def _token_part(self, x, projected):
        if self.token_map == "linear":
            return token_temperature(x, self.weight)
        if self.token_map == "mlp":
            return mlp_temperature(x, self.hidden, self.weight)
        if self.token_map == "weight_sharing":
            return weight_sharing_temperature(projected, self.weight)
        return feature_sharing_temperature(projected, self.weight)
