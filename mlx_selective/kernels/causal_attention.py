"""Plain causal attention on the tile vocabulary of ``metal/tile``.

Not a feature: MLX has it, as ``mx.fast.scaled_dot_product_attention``. It exists to prove the
vocabulary end to end and to be measured beside MLX's own.
"""

import math
from functools import lru_cache

import mlx.core as mx

from .backend import find_backend
from .blocks import HEAD_SIZES, METAL, Blocks, heads_together
from .choice import FLOATS
from .kernel import Kernel, Launch
from .signature import constants
from .threadgroup_memory import block_bytes

_KERNEL = Kernel("attention/causal.metal")

#: By backend, bytes of an element and head size. CUDA: as many rows as the registers hold, since a
#: fragment of keys is read once for all of a simdgroup's rows (float32 at D 80 spills twelve
#: words); measured on an H200.
BLOCKS = {
    ("metal", 2): METAL,
    ("metal", 4): METAL,
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
        (B, H, T, D) in q's dtype. Logits, weights and sums are float32; on CUDA the weights are
        rounded to q's dtype for the product with v, as in other fused attention. Scaled logits
        count to 1e8: beyond that the gaps between float32 numbers are themselves beyond what an
        exponential holds, and results can be NaN. q k^T is formed before it is scaled.

    Raises:
        ValueError: if the kernel has no such dtype or head size, if shapes do not belong together
            or scale is not positive.
        KernelError: if no backend runs kernels here.
    """
    _check(q, k, v, scale)
    # where there is no backend the launch says so
    backend = find_backend().name or "metal"
    blocks = blocks or BLOCKS[backend, q.dtype.size][q.shape[3]]
    launch = _prepare(_KERNEL, backend, q.dtype, q.shape, k.shape[1:3], float(scale), blocks)
    return launch(q, k, v)[0]


@lru_cache(maxsize=64)
def _prepare(kernel, backend, dtype, shape, keys_shape, scale, blocks) -> Launch:
    (B, H, T, D), (heads, N) = shape, keys_shape
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * dtype.size * heads // H)
    return kernel.prepare(
        template={
            "T": dtype,
            "D": D,
            "BQ": blocks.queries,
            "BK": blocks.keys,
            "R": blocks.rows,
            "PAIRS": blocks.pairs,
            "STAGED": blocks.staged,
        },
        grid=(wide * threads, math.ceil(T / blocks.queries), B * H // wide),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
        shared_memory=block_bytes(
            2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged, D, dtype
        ),
        numbers=[constants([T, N, H // heads], mx.int32), constants([scale], mx.float32)],
    )


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
    # the kernel multiplies by it in float32, in base 2
    smallest, largest = 1.2e-38, 2e38
    if not smallest < scale < largest:
        raise ValueError(f"scale must be a positive number that float32 holds, got {scale}.")
