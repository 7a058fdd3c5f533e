"""Whole texts at once, as a pruned cache would have read them: what each key lives to see.

Which keys leave depends on what head 0 selects, not on what attention then reads: in each layer,
S tells when each key leaves, and attention runs once, in which a query sees the keys that are
still there.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import numpy as np

from ..heads import head_logits
from .definition import selective_attention

_chunks: list[int] = []


@contextmanager
def as_decoded(chunk: int = 1) -> Iterator[None]:
    """Selective layers without a cache keep to their budgets while the block runs.

    In this process, as if the text came ``chunk`` tokens at a time: ``model(ids)`` gives the logits
    that ``model(ids[:, i : i + chunk], cache=cache)`` would give one after the other.

    Args:
        chunk: tokens of a call, at least 1; keys beyond the budget leave after each.

    Raises:
        ValueError: if chunk is below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}.")
    _chunks.append(chunk)
    try:
        yield
    finally:
        _chunks.pop()


def current_chunk() -> int | None:
    """The innermost one, if there is one."""
    return _chunks[-1] if _chunks else None


def decoded_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    budget: int | None,
    chunk: int = 1,
    gain: float | None = None,
) -> mx.array:
    """Selective attention of a whole text under a budget, as a cache gives it.

    Args:
        q: (B, H, N, D), float32, float16 or bfloat16.
        k: (B, Hkv, N, D).
        v: (B, Hkv, N, Dv).
        scale: multiplies the logits.
        budget: keys that stay, at least 2, or None for all.
        chunk: tokens that come at a time.
        gain: multiplies S.

    Returns:
        (B, H, N, Dv) in q's dtype. Needs (B, N, N) float32 for the mask; where chunk is 1, S is
        brought to the processor.
    """
    N = q.shape[2]
    if budget is None or budget >= N:
        return selective_attention(q, k, v, scale=scale, gain=gain)
    if chunk > 1:
        options = {"keep": budget, "block_size": chunk}
        return selective_attention(q, k, v, scale=scale, gain=gain, **options)
    z = head_logits(q[:, :1].astype(mx.float32) * scale, k[:, :1])[:, 0]
    at = mx.arange(N)
    S = mx.where((at[None] > 0) & (at[None] < at[:, None]), mx.maximum(z, 0), 0)
    S = S if gain is None else S * gain
    last = mx.array(last_queries(np.array(S), budget))
    seen = (at[None] <= at[:, None]) & (at[:, None] <= last[:, None])
    mask = mx.where(seen, -mx.cumsum(S, axis=1, inclusive=False), -mx.inf)[:, None]
    wide = (one.astype(mx.float32) for one in (q, k, v))  # F is too large for half precision
    return mx.fast.scaled_dot_product_attention(*wide, scale=scale, mask=mask).astype(q.dtype)


def last_queries(S: np.ndarray, budget: int) -> np.ndarray:
    """The last query that sees each key, where tokens come one at a time.

    After the attention of each token beyond the budget the key with the largest F leaves, of equals
    the oldest, but for the first token and the newest.

    Args:
        S: (B, N, N) float32, what query i selects of key j; 0 from j = i on.
        budget: keys that stay, at least 2.

    Returns:
        (B, N) int32; N - 1 for keys that stay to the end.
    """
    B, N, _ = S.shape
    rows, F = np.arange(B), np.zeros((B, N), np.float32)
    last = np.full((B, N), N - 1, np.int32)
    gone = np.zeros((B, N), bool)
    gone[:, 0] = True  # it never leaves
    for token in range(N):
        F += S[:, token]
        if token >= budget:
            rank = np.where(gone[:, 1:token], -1, F[:, 1:token])
            leaves = 1 + rank.argmax(axis=1)
            gone[rows, leaves] = True
            last[rows, leaves] = token
    return last
