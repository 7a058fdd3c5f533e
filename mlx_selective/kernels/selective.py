"""Selective attention over many queries: F for a chunk of them, then all heads with that F."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

import mlx.core as mx

from .backend import find_backend
from .blocks import HEAD_SIZES, METAL, Blocks, heads_together
from .choice import choose_backend, why_not_heads
from .gradient import with_gradient_of
from .kernel import Kernel
from .threadgroup_memory import block_bytes

MASK = Kernel("selective/mask.metal")
ATTENTION = Kernel("selective/attention.metal")
#: The mask holds -F / scale in float16, which counts to 65504, beside half-precision heads: with a
#: scale from here on, what overflows has a weight of less than exp(-128).
SMALLEST_SCALE = 1 / 512
#: tau of the memory loss: F from which on a key counts as forgotten
TAU = 1.0


class MaskBlocks(NamedTuple):
    """Sizes of the mask kernel: ``keys`` of a threadgroup, ``rows`` of queries in a step."""

    keys: int
    rows: int


#: By backend, bytes of an element and head size; see causal_attention.
BLOCKS = {
    ("metal", 2): METAL,
    ("metal", 4): METAL,
    ("cuda", 2): {
        64: Blocks(128, 64, 32, 2),
        80: Blocks(128, 64, 32, 2, True),
        96: Blocks(128, 64, 32, 2, True),
        128: Blocks(128, 48, 32, 2, True),
    },
    ("cuda", 4): dict.fromkeys((64, 80), Blocks(128, 32, 32, 2, True))
    | dict.fromkeys((96, 128), Blocks(128, 32, 32, 1, True)),
}
MASK_BLOCKS = {
    ("metal", 2): MaskBlocks(64, 16),
    ("metal", 4): MaskBlocks(32, 16),
    ("cuda", 2): MaskBlocks(64, 32),
    ("cuda", 4): MaskBlocks(64, 32),
}
#: the mask of a chunk takes at most this share of the bytes of queries, keys, values and output
MASK_SHARE = 1 / 5


def selective(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    F: mx.array,
    *,
    scale: float,
    query_positions: mx.array,
    key_positions: mx.array,
    plain: Callable,
    remaining: bool = False,
    chunk: int | None = None,
) -> list[mx.array] | None:
    """Selective attention by the kernels of ``metal/selective``, where they apply.

    F is formed once for all heads, as the additive mask of a chunk of queries, in one pass down
    head 0's logits (arXiv 2410.02703); each head then begins its logits at that mask. Beside
    inputs and outputs there are a chunk's mask, a fifth of their bytes at most (or 128 queries),
    and a second copy of the output.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128.
        k: (B, Hkv, N, D), N >= T; the queries' own keys are the last T, in order.
        v: (B, Hkv, N, D).
        F: (B, N) float32, what earlier queries left on the keys.
        scale: multiplies the logits.
        query_positions: (B, T) int32, negative for padding.
        key_positions: (B, N) int32, negative for padding and empty slots.
        plain: the same function of q, k, v and F in plain MLX, for the gradients; returns
            [output, F] and, with ``remaining``, that too.
        remaining: whether to sum up 1 - min(F, 1) over the keys that each query sees (the
            memory that the paper's loss counts, tau = 1).
        chunk: queries of a chunk, a multiple of the blocks' queries; None for what fits.

    Returns:
        [output (B, H, T, D) in q's dtype, F (B, N) float32 after the queries, and, with
        ``remaining``, (B, T) float32], or None where plain MLX has to compute them.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    if choose_backend(ATTENTION, partial(_why_plain, q, k, v, scale)) is None:
        return None

    def forward(q, k, v, F):
        return _launch(q, k, v, F, scale, query_positions, key_positions, remaining, chunk)

    return list(with_gradient_of(plain, forward)(q, k, v, F))


def _why_plain(q: mx.array, k: mx.array, v: mx.array, scale: float) -> str:
    """What the kernels cannot do of this call; "" if they can all."""
    reason = why_not_heads(q, k, v, HEAD_SIZES)
    if reason:
        return reason
    if q.shape[2] == 1:
        return "one query"
    if not scale > 0 or (q.dtype.size == 2 and scale < SMALLEST_SCALE):
        return f"scale {scale}"
    return ""


def _launch(q, k, v, F, scale, query_positions, key_positions, remaining, chunk) -> list[mx.array]:
    """Chunk by chunk, each after the one before: [output, F, remaining]."""
    (B, _, T, _), N = q.shape, k.shape[2]
    backend = find_backend().name or "metal"
    blocks = BLOCKS[backend, q.dtype.size][q.shape[3]]
    pitch, tall = (_up(n, size) for n, size in ((N, blocks.keys), (T, blocks.queries)))
    positions = [
        mx.pad(query_positions, ((0, 0), (0, tall - T)), constant_values=-1),
        mx.pad(key_positions, ((0, 0), (0, pitch - N)), constant_values=-1),
    ]
    F = mx.pad(F, ((0, 0), (0, pitch - N)))
    heads0 = [mx.contiguous(array[:, 0]) for array in (q, k)]
    q, k, v = (mx.contiguous(array) for array in (q, k, v))
    mask_dtype = mx.float32 if q.dtype == mx.float32 else mx.float16
    if chunk is None:
        chunk = _chunk(q, k, B * pitch * mask_dtype.size, blocks.queries)
    outputs, needed = [], []
    for start in range(0, T, chunk):
        rows = min(chunk, T - start)
        mask, F, part = _mask(
            *heads0, *positions, F, start, rows, scale, mask_dtype, blocks, remaining
        )
        outputs.append(_attention(q, k, v, mask, start, rows, scale, blocks))
        # The next chunk's mask takes the place of this one's, not one beside it.
        F = mx.depends(F, outputs[-1])
        needed.append(part)
    together = mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
    results = [together, F[:, :N]]
    if remaining:
        results.append(_sum_remaining(mx.concatenate(needed, axis=1), N, T))
    return results


def _mask(q, k, query_positions, key_positions, F, start, rows, scale, dtype, blocks, remaining):
    """The additive mask of a chunk (B, rows, P), F after it (B, P), remaining memory by keys."""
    (B, T, D), N, P = q.shape, k.shape[1], F.shape[1]
    keys, step = MASK_BLOCKS[find_backend().name or "metal", q.dtype.size]
    sizes, numbers = _mask_numbers((T, N, P, query_positions.shape[1], start, rows), scale)
    return MASK(
        inputs=[q, k, query_positions, key_positions, F, sizes, numbers],
        template={
            "T": q.dtype,
            "M": dtype,
            "D": D,
            "KEYS": keys,
            "R": step,
            "ALIGN": blocks.queries,
            "BK": blocks.keys,
            "REMAINING": remaining,
        },
        grid=(math.ceil(P / keys) * 2 * keys, B, 1),
        threadgroup=(2 * keys, 1, 1),
        output_shapes=[(B, rows, P), (B, P), (B, rows, P // 16) if remaining else (1,)],
        output_dtypes=[dtype, mx.float32, mx.float32],
        shared_memory=block_bytes(keys + step, D, q.dtype),
    )


def _attention(q, k, v, mask, start, rows, scale, blocks: Blocks) -> mx.array:
    """The chunk's output (B, H, rows, D)."""
    B, H, T, D = q.shape
    heads, N, P = k.shape[1], k.shape[2], mask.shape[2]
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * q.dtype.size * heads // H)
    sizes, number = _attention_numbers((T, N, H // heads, H, P, start, rows), scale)
    (out,) = ATTENTION(
        inputs=[q, k, v, mask, sizes, number],
        template={
            "T": q.dtype,
            "M": mask.dtype,
            "D": D,
            "BQ": blocks.queries,
            "BK": blocks.keys,
            "R": blocks.rows,
            "PAIRS": blocks.pairs,
            "STAGED": blocks.staged,
        },
        grid=(wide * threads, math.ceil(rows / blocks.queries), B * H // wide),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, H, rows, D)],
        output_dtypes=[q.dtype],
        shared_memory=block_bytes(
            2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged, D, q.dtype
        ),
    )
    return out


def _sum_remaining(parts: mx.array, keys: int, queries: int) -> mx.array:
    """(B, T): sums over a query's keys; the kernel leaves out those that come after it."""
    first = 16 * mx.arange(parts.shape[2])
    last = keys - queries + mx.arange(parts.shape[1])[:, None]
    return mx.where(first <= last, parts, 0).sum(axis=2)


def _chunk(q: mx.array, k: mx.array, row: int, step: int) -> int:
    """Queries of a chunk, where the mask takes ``row`` bytes a query."""
    most = int(2 * (q.nbytes + k.nbytes) * MASK_SHARE / row)
    chunks = math.ceil(q.shape[2] / max(step, 128, most))
    return _up(math.ceil(q.shape[2] / chunks), step)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@lru_cache(maxsize=512)
def _mask_numbers(sizes: tuple[int, ...], scale: float) -> tuple[mx.array, mx.array]:
    """What the kernel reads from constant memory; kept, since making arrays takes time too."""
    return mx.array(sizes, mx.int32), mx.array([scale, TAU], mx.float32)


@lru_cache(maxsize=512)
def _attention_numbers(sizes: tuple[int, ...], scale: float) -> tuple[mx.array, mx.array]:
    return mx.array(sizes, mx.int32), mx.array([scale], mx.float32)
