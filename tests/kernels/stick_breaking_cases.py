"""Stick-breaking by the kernel on the processor, and its definition in float64, for the tests."""

import mlx.core as mx
import numpy as np
import oracle
from place import launching

from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels import outputs_start_as
from mlx_selective.kernels.stick_breaking import stick_breaking


def normal(dtype=mx.float32, D=64, T=7, earlier=0, heads=(2, 1), B=1, seed=0):
    """q, k and v of normal numbers; ``heads`` are H, Hkv, ``earlier`` keys before the queries'."""
    keys = mx.random.split(mx.random.key(seed), 3)
    lengths = (heads[0], T), (heads[1], T + earlier), (heads[1], T + earlier)
    return [
        mx.random.normal((B, *length, D), key=key).astype(dtype)
        for length, key in zip(lengths, keys, strict=True)
    ]


def shifted(q, k, by):
    """q and k with their first number such that every logit q k has ``by`` added."""
    q = mx.concatenate([mx.ones((*q.shape[:3], 1), q.dtype), q[..., 1:]], 3)
    return q, mx.concatenate([mx.full((*k.shape[:3], 1), by, k.dtype), k[..., 1:]], 3)


def definition(q, k, v, scale, attend_current=False, begins=None):
    """The output and the remainder of NumPy arrays, row by row, in float64."""
    B, H, T, _ = q.shape
    N = k.shape[2]
    k, v = oracle.repeat_heads(k, H), oracle.repeat_heads(v, H)
    out, remainder = np.zeros((B, H, T, v.shape[3])), np.ones((B, H, T))
    for b, h, i in np.ndindex(B, H, T):
        # from the newest key backwards
        keys = np.arange(
            N - T + i + attend_current - 1, -1 if begins is None else begins[b] - 1, -1
        )
        z = scale * k[b, h, keys] @ q[b, h, i]
        beta, rest = np.exp(-np.logaddexp(0, -z)), np.exp(-np.logaddexp(0, z))
        left = np.cumprod(np.r_[1, rest])
        out[b, h, i], remainder[b, h, i] = (left[:-1] * beta) @ v[b, h, keys], left[-1]
    return out, remainder


def by_kernel(q, k, v, scale, **options):
    """The kernel's; outputs begin as NaN, so that what is not written shows."""
    with launching(), outputs_start_as(float("nan")):
        return stick_breaking(q, k, v, scale=scale, definition=plain_stick_breaking, **options)


def plain(q, k, v, scale, attend_current=False, begins=None):
    """The package's definition in plain MLX."""
    mask = None
    if begins is not None:
        mask = (mx.arange(k.shape[2]) >= begins[:, None])[:, None, None]
    return plain_stick_breaking(q, k, v, scale=scale, attend_current=attend_current, mask=mask)


def rms(array: np.ndarray) -> float:
    """The root mean square."""
    return np.sqrt((array**2).mean())
