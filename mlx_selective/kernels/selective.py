"""Selective attention over many queries: F for a chunk of them, then all heads with that F."""

from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from .blocks import HEAD_SIZES, METAL, Blocks, heads_together, whole
from .choice import choose_backend, why_not_heads, why_not_scale
from .gradient import with_gradient_of
from .graphs import Graphs
from .kernel import Kernel, Launch
from .selective_chunks import cut_queries, share_queries
from .selective_mask import Masks
from .signature import constants
from .threadgroup_memory import block_bytes

ATTENTION = Kernel("selective/attention.metal")
#: The mask holds -F / scale in float16, which counts to 65504, beside half-precision heads: with a
#: scale from here on, what overflows has a weight of less than exp(-128) beside a key of logit 0
#: that nobody forgets.
SMALLEST_SCALE = 1 / 512
#: beyond these, -F / scale or a product leaves float32's range
SMALLEST_FLOAT32_SCALE, LARGEST_SCALE = 2.0**-60, 2.0**60

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


def selective(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    F: mx.array,
    *,
    scale: float,
    query_positions: mx.array,
    key_positions: mx.array,
    definition: Callable,
    remaining: bool = False,
    chunk: int | None = None,
) -> list[mx.array] | None:
    """Selective attention by the kernels of ``metal/selective``, where they apply.

    F is formed once for all heads, as the additive mask of a chunk of queries, from head 0's
    logits (arXiv 2410.02703); each head then begins its logits at that mask. Beside inputs and
    outputs there are, twice, F at the start of each block of queries (float32, N for each 32
    queries on Metal, 128 on CUDA), and either the mask of all queries, where that takes at most
    half of the bytes of inputs and output, or a second copy of the output and the masks of two
    chunks, an eighth of those bytes each or what 256 threadgroups need.

    Precision: half-precision heads read the mask in float16, so that a logit is off by up to
    F / 2048. This shows where a key keeps its weight in spite of a large F, since its logit is
    larger still: logits of standard deviation 16 have outputs off by 3e-4, of 64 by 1e-3
    (RMS-relative). An infinite key makes queries before it NaN in its block.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128. As k and v not a
            slice that begins within a row: row-contiguous ones are read in vectors of 16 bytes.
        k: (B, Hkv, N, D), N >= T; the queries' own keys are the last T, in order.
        v: (B, Hkv, N, D).
        F: (B, N) float32, what earlier queries left on the keys.
        scale: multiplies the logits.
        query_positions: (B, T) int32, negative for padding.
        key_positions: (B, N) int32, negative for padding and empty slots.
        definition: the same in plain MLX, for the gradients:
            ``definition(q, k, v, F, query_positions, key_positions, scale=, remaining=)``, which
            returns [output, F] and, with ``remaining``, that too.
        remaining: whether to sum up 1 - min(F, 1) over the keys that each query sees (the
            memory that the paper's loss counts, tau = 1).
        chunk: queries of a chunk, in whole blocks; None for what fits.

    Returns:
        [output (B, H, T, D) in q's dtype, F (B, N) float32 after the queries, and, with
        ``remaining``, (B, T) float32], or None where plain MLX has to compute them.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = choose_backend(ATTENTION, partial(_why_plain, q, k, v, scale))
    if backend is None:
        return None
    settings = definition, backend, q.dtype, q.shape, k.shape[1:3], float(scale), remaining, chunk
    return list(_graphs(*settings)(q, k, v, F, query_positions, key_positions))


def _function(definition, backend, dtype, shape, keys_shape, scale, remaining, chunk):
    """Of the arrays: launches, and with derivatives."""
    blocks = BLOCKS[backend, dtype.size][shape[3]]

    def plain(*arrays):
        return definition(*arrays, scale=scale, remaining=remaining)

    def launches(q, k, v, F, *positions):
        return _launch(q, k, v, F, positions, scale, backend, blocks, remaining, chunk)

    return launches, with_gradient_of(plain, launches)


_graphs = Graphs(_function)


def _why_plain(q: mx.array, k: mx.array, v: mx.array, scale: float) -> str:
    """What the kernels cannot do of this call; "" if they can all."""
    reason = why_not_heads(q, k, v, HEAD_SIZES) or why_not_scale(scale)
    if reason:
        return reason
    if q.shape[2] == 1:
        return "one query"
    smallest = SMALLEST_SCALE if q.dtype.size == 2 else SMALLEST_FLOAT32_SCALE
    if not smallest <= scale <= LARGEST_SCALE:
        return f"scale {scale}"
    # as many as the smallest blocks of queries have
    starts = k.shape[0] * -(-q.shape[2] // METAL[q.shape[3]].queries) * k.shape[2]
    if starts >= 2**31:
        return f"{starts} values of F at block starts, more than 32 bits count"
    return ""


def _launch(q, k, v, F, positions, scale, backend, blocks, remaining, chunk) -> list[mx.array]:
    """Chunk by chunk: [output, F, remaining]."""
    (B, H, T, _), N = q.shape, k.shape[2]
    dtype = mx.float32 if q.dtype == mx.float32 else mx.float16
    q, k, v = (mx.contiguous(array) for array in (q, k, v))
    if chunk is None:
        room, chunks = share_queries(B, H, T, N, q.nbytes + k.nbytes, dtype.size, blocks)
    else:
        room, chunks = cut_queries(B, T, N, whole(chunk, blocks.queries), blocks)
    masks = Masks(
        *(q, k),
        _padded(F, whole(N, blocks.keys), 0),
        _padded(positions[0], whole(T, blocks.queries), -1),
        _padded(positions[1], whole(N, blocks.keys), -1),
        scale=scale,
        backend=backend,
        dtype=dtype,
        align=blocks.queries,
        keys=blocks.keys,
        remaining=remaining,
        room=room,
    )
    outputs, needed, settings = [], [], (q.shape, k.shape[1:3], backend, scale, blocks)
    for part in chunks:
        mask, formed, sums = masks.form(*part)
        outputs += _prepare(ATTENTION, q.dtype, dtype, part, *settings)(q, k, v, mask, formed)
        masks.used_for(outputs[-1])
        if remaining:
            needed.append(_sum_remaining(sums, N - T + part[0]))
    results = [outputs, [masks.after()[:, :N]], *([needed] if remaining else [])]
    axes = (2, 1, 1)
    return [
        mx.concatenate(one, axis=axis) if len(one) > 1 else one[0]
        for one, axis in zip(results, axes, strict=False)
    ]


@lru_cache(maxsize=512)
def _prepare(kernel, dtype, mask_dtype, part, shape, keys_shape, backend, scale, blocks) -> Launch:
    """The launch for a chunk's output (B, H, rows, D)."""
    (B, H, T, D), (heads, N), (start, rows, width) = shape, keys_shape, part
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * dtype.size * heads // H)
    sizes = (T, N, H // heads, H, width, start, rows)
    return kernel.prepare(
        template={
            "T": dtype,
            "M": mask_dtype,
            "D": D,
            "BQ": blocks.queries,
            "BK": blocks.keys,
            "R": blocks.rows,
            "PAIRS": blocks.pairs,
            "STAGED": blocks.staged,
        },
        grid=(wide * threads, -(-rows // blocks.queries), B * H // wide),
        threadgroup=(threads, 1, 1),
        output_shapes=[(B, H, rows, D)],
        output_dtypes=[dtype],
        shared_memory=shared_bytes(blocks, D, dtype),
        numbers=[constants(sizes, mx.int32), constants([scale], mx.float32)],
    )


def shared_bytes(blocks: Blocks, head_size: int, dtype: mx.Dtype) -> int:
    """Bytes of a threadgroup's memory on CUDA."""
    rows = 2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged
    mask = block_bytes(blocks.queries, blocks.keys, dtype) if blocks.pairs == 2 else 0
    return block_bytes(rows, head_size, dtype) + mask


def _sum_remaining(parts: mx.array, earlier: int) -> mx.array:
    """(B, rows): sums over a query's keys; the kernel leaves out those that come after it.

    Args:
        parts: (B, rows, width / 16), of queries that come after ``earlier`` keys.
        earlier: keys before the first query's own.
    """
    first = 16 * mx.arange(parts.shape[2])
    last = earlier + mx.arange(parts.shape[1])[:, None]
    return mx.where(first <= last, parts, 0).sum(axis=2)


def _padded(array: mx.array, length: int, value: int) -> mx.array:
    """With the second axis of that length."""
    missing = length - array.shape[1]
    return mx.pad(array, ((0, 0), (0, missing)), constant_values=value) if missing else array
