"""SSA as its tests see it: every setting with random parameters, in MLX and in NumPy float64."""

import mlx.core as mx
import numpy as np
import oracle
from methods import float64, random_qkv
from mlx.utils import tree_flatten

from mlx_selective import ssa_attention
from mlx_selective.attention.ssa import Temperature
from mlx_selective.attention.ssa.temperature import POSITION_MAPS, TOKEN_MAPS

#: every token map with every position map but for ("none", "none")
MAPS = [(t, p) for t in TOKEN_MAPS for p in POSITION_MAPS if (t, p) != ("none", "none")]
PARTS = ("query", "key", "value")


def randomised(temperature: Temperature, rng) -> Temperature:
    """The same with random parameters, so that the temperature goes from about 0.2 to 3."""
    weights = []
    for name, value in tree_flatten(temperature.parameters()):
        size = value.shape[-1] if value.ndim else 1
        spread = 1.0 if name in ("alpha", "beta", "hidden") else 0.8 * size**-0.5
        weights.append((name, mx.array(rng.normal(0, spread, value.shape).astype(np.float32))))
    temperature.load_weights(weights)
    return temperature


class Setting:
    """Temperatures of query, key and value with random parameters, and a layer's input.

    Attributes: ``x`` (B, T, C), ``qkv`` as MLX arrays of the dtype, ``x64`` and ``qkv64`` the same
    values in float64. What is projected is q, k and v themselves: there is no RoPE here.
    """

    def __init__(self, maps, seed=0, B=2, H=4, Hkv=2, T=9, C=10, D=6, Dv=None, dtype="float32"):
        self.maps = maps
        rng = np.random.default_rng(seed)
        self.qkv, self.qkv64 = random_qkv(seed, B=B, H=H, Hkv=Hkv, T=T, D=D, Dv=Dv, dtype=dtype)
        self.x = mx.array(rng.standard_normal((B, T, C))).astype(getattr(mx, dtype))
        self.x64 = float64(self.x)
        sizes = ((H, D), (Hkv, D), (Hkv, Dv or D))
        self.temperatures = {
            part: randomised(Temperature(heads, C, size, *maps), rng)
            for part, (heads, size) in zip(PARTS, sizes, strict=True)
        }

    def taus(self, x, qkv, count):
        """Query, key and value temperatures."""
        return [
            temperature(x, projected, count)
            for temperature, projected in zip(self.temperatures.values(), qkv, strict=True)
        ]

    def run(self, scale=0.5, *, x=None, qkv=None, count=None, **options):
        """ssa_attention under all three temperatures."""
        x, qkv = (self.x if x is None else x), (self.qkv if qkv is None else qkv)
        count = mx.arange(1, x.shape[1] + 1) if count is None else count
        return attend(*qkv, *self.taus(x, qkv, count), scale, **options)

    def parameters(self) -> list[dict[str, np.ndarray]]:
        """The parameters of the three in float64."""
        return [
            {name: float64(value) for name, value in tree_flatten(temperature.parameters())}
            for temperature in self.temperatures.values()
        ]

    def truth(self, scale=0.5):
        """What ``run`` should give."""
        return truth(self.maps[0], self.x64, *self.qkv64, self.parameters(), scale)


def attend(q, k, v, tau_q, tau_k, tau_v, scale, **options):
    return ssa_attention(q, k, v, tau_q, tau_v, key_temperature=tau_k, scale=scale, **options)


def truth(token_map, x, q, k, v, parameters, scale):
    """SSA in float64; ``parameters`` of query, key and value."""
    counts = np.broadcast_to(np.arange(1, x.shape[1] + 1), x.shape[:2])
    tau_q, tau_k, tau_v = (
        oracle.ssa_tau(x, projected, counts, token_map, **own)
        for projected, own in zip((q, k, v), parameters, strict=True)
    )
    return oracle.ssa(q, k * tau_k[..., None], v, tau_q, tau_v, scale)
