"""Plain causal attention on the tile vocabulary of ``metal/tile``.

Not a feature: MLX has it, as ``mx.fast.scaled_dot_product_attention``. It exists to prove the
vocabulary end to end and to be measured beside MLX's own.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .backend import find_backend
from .choice import FLOATS
from .kernel import Kernel
from .threadgroup_memory import block_bytes

_KERNEL = Kernel("attention/causal.metal")

#: head sizes D that the kernel is written for
HEAD_SIZES = (64, 80, 96, 128)


class Blocks(NamedTuple):
    """The sizes of a threadgroup's work.

    ``queries`` in all, ``rows`` for each simdgroup; ``keys`` in a block, with room for ``pairs``
    of blocks of keys and values; ``staged``: the queries wait in threadgroup memory, for want
    of registers.
    """

    queries: int
    keys: int
    rows: int
    pairs: int
    staged: bool = False


#: By backend, bytes of an element and head size. Metal: MLX's own sizes (steel_attention). CUDA: as
#: many rows as the registers hold, since a fragment of keys is read once for all of a simdgroup's
#: rows; measured on an H200.
BLOCKS = {
    ("metal", 2): dict.fromkeys((64, 80, 96), Blocks(32, 32, 8, 1)) | {128: Blocks(32, 16, 8, 1)},
    ("metal", 4): dict.fromkeys((64, 80, 96), Blocks(32, 32, 8, 1)) | {128: Blocks(32, 16, 8, 1)},
    ("cuda", 2): {
        64: Blocks(128, 96, 32, 2),
        80: Blocks(128, 64, 32, 2, True),
        96: Blocks(128, 64, 32, 2, True),
        128: Blocks(128, 48, 32, 2, True),
    },
    # at most 99 KB of shared memory, for cards that have no more
    ("cuda", 4): dict.fromkeys((64, 80), Blocks(128, 32, 32, 2, True))
    | dict.fromkeys((96, 128), Blocks(128, 32, 32, 1, True)),
}

#: bytes of keys and values that are read at about the same time, so that they stay in the GPU's
#: second-level cache (60 MB on an H200; from 32 to 128 MB was within 2 % there)
CACHE = 64 << 20


def causal_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, blocks: Blocks | None = None
) -> mx.array:
    """softmax(scale q k^T + causal) v with the kernel of ``metal/attention/causal.metal``.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128. As k and v, an array
            that begins at a multiple of 16 bytes, as all but slices of flat arrays do.
        k: (B, Hkv, N, D), N >= T >= 1, Hkv divides H; the queries are the last T positions.
        v: (B, Hkv, N, D).
        scale: multiplies the logits, > 0 (masked logits are -inf before they are scaled).
        blocks: other block sizes than the backend's, to measure them.

    Returns:
        (B, H, T, D) in q's dtype. Logits, weights and sums are float32, and q k^T is formed before
        it is scaled, so that its overflow is NaN; on CUDA the weights are
        rounded to q's dtype for the product with v, as in other fused attention.

    Raises:
        ValueError: if the kernel has no such dtype or head size, if shapes do not belong together
            or scale is not positive.
        KernelError: if no backend runs kernels here.
    """
    _check(q, k, v, scale)
    B, H, T, D = q.shape
    heads, N = k.shape[1], k.shape[2]
    # where there is no backend the launch says so
    backend = find_backend().name or "metal"
    blocks = blocks or BLOCKS[backend, q.dtype.size][D]
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * q.dtype.size * heads // H)
    (out,) = _KERNEL(
        inputs=[q, k, v, *_numbers(T, N, H // heads, scale)],
        template={
            "T": q.dtype,
            "D": D,
            "BQ": blocks.queries,
            "BK": blocks.keys,
            "R": blocks.rows,
            "PAIRS": blocks.pairs,
            "STAGED": blocks.staged,
        },
        grid=(wide * threads, math.ceil(T / blocks.queries), B * H // wide),
        threadgroup=(threads, 1, 1),
        output_shapes=[q.shape],
        output_dtypes=[q.dtype],
        shared_memory=block_bytes(
            2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged, D, q.dtype
        ),
    )
    return out


def _check(q: mx.array, k: mx.array, v: mx.array, scale: float) -> None:
    if q.dtype not in FLOATS or not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k, v must be one of {FLOATS}, got {q.dtype}, {k.dtype}, {v.dtype}.")
    if q.ndim != 4 or k.ndim != 4 or v.shape != k.shape or 0 in (*q.shape, *k.shape):
        raise ValueError(f"shapes do not belong together: {q.shape}, {k.shape}, {v.shape}.")
    B, H, T, D = q.shape
    if D not in HEAD_SIZES:
        raise ValueError(f"the head size must be one of {HEAD_SIZES}, got {D}.")
    if k.shape[0] != B or k.shape[3] != D or H % k.shape[1] or T > k.shape[2]:
        raise ValueError(f"shapes do not belong together: {q.shape}, {k.shape}, {v.shape}.")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}.")


def heads_together(heads: int, each: int) -> int:
    """How many heads are worked at side by side, if keys and values of one take ``each`` bytes."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * each <= CACHE))


@lru_cache(maxsize=64)
def _numbers(queries: int, keys: int, group: int, scale: float) -> tuple[mx.array, mx.array]:
    """What the kernel reads from constant memory; kept, since making arrays takes time too."""
    return mx.array([queries, keys, group], mx.int32), mx.array([scale], mx.float32)
