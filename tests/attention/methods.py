"""The methods as the tests see them: the package's function beside the oracle's."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import oracle

from mlx_selective import selective_attention, ssa_attention, stick_breaking_attention


@dataclass(frozen=True)
class Case:
    """One method: ``run`` on MLX arrays and ``truth`` on NumPy ones, both (q, k, v, scale).

    ``block_size`` is passed on, so that short sequences take several blocks too.
    """

    name: str
    run: Callable
    truth: Callable

    def __str__(self):
        return self.name


def temperatures(shape, seed=5):
    """Positive temperatures around 1 for (B, H, T), the same in every row of the batch."""
    row = np.random.default_rng(seed).uniform(0.4, 2.0, shape[1:]).astype(np.float32)
    return np.broadcast_to(row, shape)


def _ssa(q, k, v, scale, **options):
    tau_q, tau_v = temperatures(q.shape[:3]), temperatures(k.shape[:3], 6)
    if isinstance(q, np.ndarray):
        return oracle.ssa(q, k, v, tau_q, tau_v, scale)
    return ssa_attention(q, k, v, mx.array(tau_q), mx.array(tau_v), scale=scale, **options)


CASES = [
    Case(
        "selective",
        lambda q, k, v, scale, **options: selective_attention(q, k, v, scale=scale, **options),
        lambda q, k, v, scale: oracle.selective(q, k, v, scale)[0],
    ),
    Case("ssa", _ssa, _ssa),
    Case(
        "stick_breaking",
        lambda *qkv, scale=None, **options: stick_breaking_attention(
            *qkv[:3], scale=qkv[3], **options
        )[0],
        lambda q, k, v, scale: oracle.stick_breaking(q, k, v, scale)[0],
    ),
    Case(
        "stick_breaking current",
        lambda *qkv, scale=None, **options: stick_breaking_attention(
            *qkv[:3], scale=qkv[3], attend_current=True, **options
        )[0],
        lambda q, k, v, scale: oracle.stick_breaking(q, k, v, scale, attend_current=True)[0],
    ),
]


def random_qkv(seed, B=2, H=4, Hkv=2, T=7, D=16, Dv=None, dtype="float32"):
    """q, k, v as MLX arrays of a dtype, and the same rounded values in float64."""
    rng = np.random.default_rng(seed)
    arrays = [
        mx.array(rng.standard_normal((B, heads, T, size)).astype(np.float32)).astype(
            getattr(mx, dtype)
        )
        for heads, size in ((H, D), (Hkv, D), (Hkv, Dv or D))
    ]
    return arrays, [float64(array) for array in arrays]


def float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def error(result, truth) -> float:
    """Root mean square of the error over that of the truth."""
    result = float64(result) if isinstance(result, mx.array) else result
    assert result.shape == truth.shape
    assert np.isfinite(result).all()
    scale = np.sqrt((truth**2).mean())
    return float(np.sqrt(((result - truth) ** 2).mean()) / (scale or 1.0))
