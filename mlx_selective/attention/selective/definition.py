"""Selective attention: the definition in plain MLX, which also runs where no kernel applies.

Leviathan, Kalman, Matias: Selective Attention Improves Transformer, arXiv 2410.02703.
"""

from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from ...cache.pruned import which_leave
from ...kernels.selective import selective
from ...kernels.selective_decode import selective_decode
from ..blocks import QUERY_BLOCK, scan_queries
from ..heads import check_heads, head_logits, masked_softmax, weigh_values
from ..visibility import Visibility, document_positions


def selective_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    query_positions: mx.array | None = None,
    key_positions: mx.array | None = None,
    F: mx.array | None = None,
    segment_ids: mx.array | None = None,
    return_F: bool = False,
    return_remaining: bool = False,
    gain: mx.array | float | None = None,
    keep: mx.array | int | None = None,
    block_size: int = QUERY_BLOCK,
) -> mx.array | tuple[mx.array, ...]:
    """Attention in which earlier queries can make later ones forget a key.

    With z the causal logits of all heads, and positions counted from 0::

        S[i, j] = relu(z[0, i, j])     head 0 selects; S = 0 for the first token and for j = i
        F[i, j] = sum of S[k, j] over k < i
        output  = softmax(z - F) v     the same F in every head

    Without the optional arguments this is the whole sequence. A cache passes what it kept: keys
    in any order with their positions, the F that earlier queries left on them, and the positions
    of the queries. The queries' own keys must be among the keys; when there are several queries,
    they are the last ones, in order.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16.
        k: (B, Hkv, N, D), N >= T, H a multiple of Hkv. Head 0 reads key head 0.
        v: (B, Hkv, N, Dv).
        scale: multiplies the logits, usually D ** -0.5.
        query_positions: (B, T) or (T,) int32, the position of each query; default the positions
            of the last T keys. A query at a negative position is padding: its output is 0, and it
            selects nothing.
        key_positions: (B, N) or (N,) int32, the position of each key; default 0 .. N - 1. A
            query sees the keys whose position is not beyond its own. Slots with a negative
            position are empty or padding (their content must be finite): nobody sees them.
        F: (B, N) float32, what queries before these have accumulated; default zeros.
        segment_ids: (B, N) or (N,) integers, for documents packed into one sequence: runs of
            equal ids. A query sees its own document only, whose first token is never forgotten.
            Not together with positions.
        return_F: also return F after these queries.
        return_remaining: also return how much of its memory each query still needs, the sum of
            1 - min(F[i, j], 1) over the keys j that query i sees: what the paper's memory loss
            counts, with tau = 1.
        gain: multiplies S, from 0 (no selection) to 1 (the paper's, as None), a number or (), which
            has no derivative.
        keep: keys of each row that stay after a block of queries, a number or () int32, as a
            cache with that budget would have it if the queries came in such blocks: the others,
            those with the largest F, have F = inf from there on. None for all.
        block_size: queries per block, where no kernel runs.

    Returns:
        The output (B, H, T, Dv) in q's dtype; with ``return_F`` also F (B, N), float32; with
        ``return_remaining`` also that, (B, T), float32, 0 for padding.

    Accumulation is in float32. Peak memory beside inputs and outputs, with L = B * H *
    block_size * N * 4 bytes for the logits of one block: q, k and v in float32, F at the start
    of each block, and at most 7 L forward, 25 L backward on the CPU (up to four times that on a
    GPU, which frees later).

    Raises:
        ValueError: if shapes do not belong together, or segment_ids come with positions.
    """
    check_heads(q, k, v)
    B, T, N = q.shape[0], q.shape[2], k.shape[2]
    documents = None
    if segment_ids is not None:
        if key_positions is not None or query_positions is not None:
            raise ValueError("segment_ids are for whole sequences; leave out the positions.")
        documents = Visibility(B, T, N, segment_ids=segment_ids)
        key_positions = document_positions(segment_ids)
    key_positions = mx.broadcast_to(
        mx.arange(N) if key_positions is None else key_positions, (B, N)
    )
    if query_positions is None:
        query_positions = key_positions[:, N - T :]
    query_positions = mx.broadcast_to(query_positions, (B, T))
    key_positions, query_positions = (
        one.astype(mx.int32) for one in (key_positions, query_positions)
    )
    F = mx.zeros((B, N), mx.float32) if F is None else F.astype(mx.float32)
    if F.shape != (B, N):
        raise ValueError(f"F must be {(B, N)} as the keys are, got {F.shape}.")

    settings = {
        "scale": scale,
        "query_positions": query_positions,
        "key_positions": key_positions,
        "remaining": return_remaining,
    }
    results = None
    if documents is None and gain is None and keep is None:
        results = selective(q, k, v, F, definition=_in_blocks(block_size), **settings)
    if results is None:
        settings |= {"documents": documents, "block_size": block_size}
        results = plain_selective(q, k, v, F, gain=gain, keep=keep, **settings)
    output, F, *remaining = results
    results = [output, *([F] if return_F else []), *remaining]
    return tuple(results) if len(results) > 1 else output


def selective_step(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    query_positions: mx.array,
    key_positions: mx.array,
    F: mx.array,
    evicts: list[int],
    gain: float | None = None,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """One token of each row over what a cache kept, with the choice of the key to evict.

    Args:
        q: (B, H, 1, D), float32, float16 or bfloat16.
        k: (B, Hkv, N, D).
        v: (B, Hkv, N, Dv).
        scale: multiplies the logits.
        query_positions: (B, 1) int32, as for :func:`selective_attention`.
        key_positions: (B, N) int32.
        F: (B, N) float32, what earlier queries left on the keys.
        evicts: for each row, whether a key leaves after this token.
        gain: multiplies S, as for :func:`selective_attention`.

    Returns:
        The output (B, H, 1, Dv), F after the token (B, N) float32, and the slots (B, 1) int32
        that a kernel found for :meth:`PrunedKVCache.prune`, or None where none ran.
    """
    settings = {
        "scale": scale,
        "query_positions": query_positions,
        "key_positions": key_positions,
    }
    found = None
    if gain is None:
        found = selective_decode(q, k, v, F, evicts=evicts, definition=_plain_step, **settings)
    return tuple(found) if found else (*_plain_step(q, k, v, F, gain=gain, **settings), None)


@lru_cache(maxsize=8)
def _in_blocks(block_size: int) -> Callable:
    """Of undivided sequences; one object for each size, since graphs are kept by it."""
    return partial(plain_selective, documents=None, block_size=block_size)


def plain_selective(
    q,
    k,
    v,
    F,
    query_positions,
    key_positions,
    *,
    scale,
    remaining,
    documents,
    block_size,
    gain=None,
    keep=None,
):
    """:func:`selective_attention` in plain MLX, whatever kernels there are; all arguments given.

    Returns:
        [output, F after the queries, and, where asked for, ``remaining`` (B, T)].
    """
    N = k.shape[2]

    def block(F, q, k, v, start):
        end, reach = start + q.shape[2], k.shape[2]
        own, key = query_positions[:, start:end, None], key_positions[:, None, :reach]
        visible = (key >= 0) & (key <= own)
        if documents is not None:
            visible = visible & documents.of_block(start, end, reach)[:, 0]
        # The first token is never forgotten, and a token never makes anyone forget itself.
        selectable = visible & (key > 0) & (key < own)
        output, added, F_rows = _attend(q, k, v, F[:, :reach], visible, selectable, gain)
        if reach < N:
            added = mx.pad(added, ((0, 0), (0, N - reach)))
        F = F + added
        if keep is not None:
            present = (mx.arange(N) < reach) & (key_positions >= 0)
            F = forget(F, key_positions, present, own.max(axis=1), keep)
        needed = mx.where(visible, 1 - mx.minimum(F_rows, 1), 0).sum(axis=-1)[:, None]
        return [F, output, *([needed] if remaining else [])]

    scaled = q.astype(mx.float32) * scale
    k, v = k.astype(mx.float32), v.astype(mx.float32)
    F, output, *needed = scan_queries(block, F, scaled, k, v, block_size=block_size)
    return [output.astype(q.dtype), F, *(one[:, 0] for one in needed)]


# one object: the graphs that are kept know it again
_plain_step = partial(plain_selective, remaining=False, documents=None, block_size=1)


def _attend(q, k, v, F, visible, selectable, gain):
    """One block of queries, scaled: its output, what it adds to F, and F as each query sees it."""
    z = head_logits(q, k)
    S = mx.where(selectable, mx.maximum(z[:, 0], 0), 0)
    if gain is not None:
        S = S * mx.stop_gradient(mx.array(gain))
    # Exclusive over queries: what a query selects counts for later ones only.
    F_rows = F[:, None]
    if S.shape[1] > 1:
        F_rows = F_rows + mx.cumsum(S, axis=1, inclusive=False)
    weights = masked_softmax(z - F_rows[:, None], visible[:, None])
    return weigh_values(weights, v), S.sum(axis=1), F_rows


def forget(
    F: mx.array, positions: mx.array, present: mx.array, newest: mx.array, keep: mx.array | int
) -> mx.array:
    """F with infinity on the keys that leave, so that at most ``keep`` of each row stay.

    The rule of the cache, where the first token and the newest stay. Nothing here has a derivative
    but F of what stays.

    Args:
        F: (B, N) float32; infinite where a key has left.
        positions: (B, N) int32, in order.
        present: (B, N) bool, keys that have come.
        newest: (B, 1) int32, the position of the newest.
        keep: a number or () int32, at least 2.
    """
    rank = mx.stop_gradient(mx.where((positions <= 0) | (positions == newest), -1.0, F))
    here = present & (rank < mx.inf)
    rank = mx.where(here, rank, -2.0)
    count = mx.maximum(here.sum(axis=1, keepdims=True) - keep, 0)
    return mx.where(which_leave(rank, count), mx.inf, F)
