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

    ``run`` takes further: ``block_size``, so that short sequences take several blocks too;
    ``segment_ids`` for packed documents; ``real`` (B, N), False where a token is padding;
    ``prefix``, the number of keys that stand before the queries.
    """

    name: str
    run: Callable
    truth: Callable

    def __str__(self):
        return self.name


def temperatures(shape, seed=5):
    """Positive temperatures around 1 for (B, H, T), the same in every row of the batch."""
    row = np.random.default_rng(seed).uniform(0.4, 2.0, (shape[1], 500)).astype(np.float32)
    return np.broadcast_to(row[:, : shape[2]], shape)


def tokens_before(real, segment_ids, shape):
    """How many real tokens of its document stand before each token, (B, N)."""
    B, N = shape
    real = np.ones((B, N), bool) if real is None else np.array(real)
    ids = np.zeros(N) if segment_ids is None else np.array(segment_ids)
    count = np.zeros((B, N), np.int32)
    for b, n in np.ndindex(B, N):
        begin = n
        while begin > 0 and ids[begin - 1] == ids[n]:
            begin -= 1
        count[b, n] = real[b, begin:n].sum()
    return count


def _selective(q, k, v, scale, real=None, prefix=0, **options):
    B, N = k.shape[0], k.shape[2]
    if real is not None:
        positions = np.where(real, tokens_before(real, None, (B, N)), -1)
        options["key_positions"] = mx.array(positions.astype(np.int32))
    if prefix:
        # what the queries before these have left on the keys
        before = [a[:, :, :prefix] for a in (options.pop("all_queries"), k, v)]
        _, F = selective_attention(*before, scale=scale, return_F=True)
        options["F"] = mx.pad(F, ((0, 0), (0, N - prefix)))
    options.pop("all_queries", None)
    return selective_attention(q, k, v, scale=scale, **options)


def _ssa(q, k, v, scale, real=None, prefix=0, all_queries=None, segment_ids=None, **options):
    """Temperatures go with a token's place in its document, so that they move with it."""
    B, N = k.shape[0], k.shape[2]
    if isinstance(q, np.ndarray):
        tau_q, tau_v = temperatures(q.shape[:3]), temperatures(k.shape[:3], 6)
        return oracle.ssa(q, k, v, tau_q, tau_v, scale)
    place = tokens_before(real, segment_ids, (B, N))
    tau_q, tau_v = (
        np.take_along_axis(temperatures((B, heads, N), seed), place[:, None], axis=2)
        for heads, seed in ((q.shape[1], 5), (k.shape[1], 6))
    )
    return ssa_attention(
        q,
        k,
        v,
        mx.array(tau_q)[:, :, N - q.shape[2] :],
        mx.array(tau_v),
        scale=scale,
        mask=None if real is None else mx.array(real)[:, None, None],
        segment_ids=segment_ids,
        **options,
    )


def _stick_breaking(attend_current):
    def run(q, k, v, scale, real=None, prefix=0, all_queries=None, **options):
        mask = None if real is None else mx.array(real)[:, None, None]
        return stick_breaking_attention(
            q, k, v, scale=scale, attend_current=attend_current, mask=mask, **options
        )[0]

    return run


def _stick_breaking_truth(attend_current):
    return lambda q, k, v, scale: oracle.stick_breaking(q, k, v, scale, attend_current)[0]


CASES = [
    Case("selective", _selective, lambda q, k, v, scale: oracle.selective(q, k, v, scale)[0]),
    Case("ssa", _ssa, _ssa),
    Case("stick_breaking", _stick_breaking(False), _stick_breaking_truth(False)),
    Case("stick_breaking current", _stick_breaking(True), _stick_breaking_truth(True)),
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
