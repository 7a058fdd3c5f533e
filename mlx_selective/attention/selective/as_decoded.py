"""Whole texts at once, as a pruned cache would have read them: what each key lives to see.

Which keys leave depends on what head 0 selects, not on what attention then reads: in each layer,
S tells when each key leaves, and attention runs once, in which a query sees the keys that are
still there.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..heads import head_logits
from .definition import selective_attention

#: which keys leave: S, the budget and a function that gives the logits less F, (B, H, N, N)
#: float32, -inf where nothing is seen; to the last query that sees each key, as last_queries
Rule = Callable[[np.ndarray, int, Callable[[], np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class Decoding:
    """How a text comes: how many tokens at a time, and by which rule keys leave."""

    chunk: int
    rule: Rule


_decodings: list[Decoding] = []


@contextmanager
def as_decoded(chunk: int = 1, rule: Rule | None = None) -> Iterator[None]:
    """Selective layers without a cache keep to their budgets while the block runs.

    In this process, as if the text came ``chunk`` tokens at a time: ``model(ids)`` gives the logits
    that ``model(ids[:, i : i + chunk], cache=cache)`` would give one after the other.

    Args:
        chunk: tokens of a call, at least 1; keys beyond the budget leave after each.
        rule: another rule by which keys leave, to compare with; tokens then come one at a time.

    Raises:
        ValueError: if chunk is below 1, or not 1 with another rule.
    """
    if chunk < 1 or (rule is not None and chunk > 1):
        raise ValueError(f"chunk must be at least 1, and 1 with another rule, got {chunk}.")
    _decodings.append(Decoding(chunk, rule or (lambda S, budget, logits: last_queries(S, budget))))
    try:
        yield
    finally:
        _decodings.pop()


def current_decoding() -> Decoding | None:
    """The innermost one, if there is one."""
    return _decodings[-1] if _decodings else None


def decoded_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    budget: int | None,
    decoding: Decoding,
    gain: float | None = None,
) -> mx.array:
    """Selective attention of a whole text under a budget, as a cache gives it.

    Args:
        q: (B, H, N, D), float32, float16 or bfloat16.
        k: (B, Hkv, N, D).
        v: (B, Hkv, N, Dv).
        scale: multiplies the logits.
        budget: keys that stay, at least 2, or None for all.
        decoding: how the text comes.
        gain: multiplies S.

    Returns:
        (B, H, N, Dv) in q's dtype. Needs (B, N, N) float32 for the mask; where tokens come one at
        a time, S is brought to the processor.
    """
    N = q.shape[2]
    if budget is None or budget >= N:
        return selective_attention(q, k, v, scale=scale, gain=gain)
    if decoding.chunk > 1:
        options = {"keep": budget, "block_size": decoding.chunk}
        return selective_attention(q, k, v, scale=scale, gain=gain, **options)
    z = head_logits(q[:, :1].astype(mx.float32) * scale, k[:, :1])[:, 0]
    at = mx.arange(N)
    S = mx.where((at[None] > 0) & (at[None] < at[:, None]), mx.maximum(z, 0), 0)
    S = S if gain is None else S * gain
    q32, k32, v32 = (one.astype(mx.float32) for one in (q, k, v))  # F is too large for halves
    causal = mx.where(at <= at[:, None], -mx.cumsum(S, axis=1, inclusive=False), -mx.inf)[:, None]

    def logits():
        return np.array(head_logits(q32 * scale, k32) + causal)

    last = mx.array(decoding.rule(np.array(S), budget, logits))[:, None, None]
    mask = mx.where(at[:, None] <= last, causal, -mx.inf)
    wide = (q32, k32, v32)
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
