"""Selective attention over many queries: F for a chunk of them, then all heads with that F."""

from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from .blocks import HEAD_SIZES, METAL, Blocks, heads_together
from .choice import choose_backend, why_not_heads
from .gradient import with_gradient_of
from .kernel import Kernel, Launch
from .selective_mask import Masks
from .threadgroup_memory import block_bytes

ATTENTION = Kernel("selective/attention.metal")
#: The mask holds -F / scale in float16, which counts to 65504, beside half-precision heads: with a
#: scale from here on, what overflows has a weight of less than exp(-128).
SMALLEST_SCALE = 1 / 512

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
#: A mask of all queries takes at most this share of the bytes of queries, keys, values and output;
#: beyond that they come in chunks, of which two have a mask of at most MASK_SHARE / 4.
MASK_SHARE = 1 / 2
#: as many threadgroups a chunk should have, whatever its mask takes: about two for each core
THREADGROUPS = 256


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

    F is formed once for all heads, as the additive mask of a chunk of queries, from head 0's
    logits (arXiv 2410.02703); each head then begins its logits at that mask. Beside inputs and
    outputs there are, twice, F at the start of each block of queries (float32, N for each 32
    queries on Metal, 128 on CUDA), and either the mask of all queries, where that takes at most
    half of the bytes of inputs and output, or a second copy of the output and the masks of two
    chunks, an eighth of those bytes each or what 256 threadgroups need.

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
    backend = choose_backend(ATTENTION, partial(_why_plain, q, k, v, scale))
    if backend is None:
        return None
    blocks = BLOCKS[backend, q.dtype.size][q.shape[3]]

    def forward(q, k, v, F):
        positions = query_positions, key_positions
        return _launch(q, k, v, F, positions, scale, backend, blocks, remaining, chunk)

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


def _launch(q, k, v, F, positions, scale, backend, blocks, remaining, chunk) -> list[mx.array]:
    """Chunk by chunk: [output, F, remaining]."""
    (B, _, T, _), N = q.shape, k.shape[2]
    pitch, tall = _up(N, blocks.keys), _up(T, blocks.queries)
    mask_dtype = mx.float32 if q.dtype == mx.float32 else mx.float16
    masks = Masks(
        *(mx.contiguous(array[:, 0]) for array in (q, k)),
        _padded(F, pitch, 0),
        _padded(positions[0], tall, -1),
        _padded(positions[1], pitch, -1),
        scale=scale,
        backend=backend,
        dtype=mask_dtype,
        align=blocks.queries,
        keys=blocks.keys,
        remaining=remaining,
    )
    if chunk is None:
        chunk = _chunk(q, k, B * pitch * mask_dtype.size, blocks.queries)
    q, k, v = (mx.contiguous(array) for array in (q, k, v))
    outputs, needed, settings = [], [], (scale, blocks)
    for start in range(0, T, chunk):
        rows = min(chunk, T - start)
        mask, formed, part = masks.form(start, rows)
        shapes = q.shape, k.shape[1:3], pitch
        launch = _prepare(ATTENTION, backend, q.dtype, mask_dtype, shapes, start, rows, *settings)
        outputs += launch(q, k, v, mask, formed)
        masks.used_for(outputs[-1])
        needed.append(part)
    together = mx.concatenate(outputs, axis=2) if len(outputs) > 1 else outputs[0]
    results = [together, masks.after[:, :N]]
    if remaining:
        results.append(_sum_remaining(mx.concatenate(needed, axis=1), N, T))
    return results


@lru_cache(maxsize=512)
def _prepare(kernel, backend, dtype, mask_dtype, shapes, start, rows, scale, blocks) -> Launch:
    """The launch for a chunk's output (B, H, rows, D)."""
    (B, H, T, D), (heads, N), pitch = shapes
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * dtype.size * heads // H)
    sizes = (T, N, H // heads, H, pitch, start, rows)
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
        numbers=[mx.array(sizes, mx.int32), mx.array([scale], mx.float32)],
    )


def shared_bytes(blocks: Blocks, head_size: int, dtype: mx.Dtype) -> int:
    """Bytes of a threadgroup's memory on CUDA."""
    rows = 2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged
    mask = block_bytes(blocks.queries, blocks.keys, dtype) if blocks.pairs == 2 else 0
    return block_bytes(rows, head_size, dtype) + mask


def _sum_remaining(parts: mx.array, keys: int, queries: int) -> mx.array:
    """(B, T): sums over a query's keys; the kernel leaves out those that come after it."""
    first = 16 * mx.arange(parts.shape[2])
    last = keys - queries + mx.arange(parts.shape[1])[:, None]
    return mx.where(first <= last, parts, 0).sum(axis=2)


def _chunk(q: mx.array, k: mx.array, row: int, step: int) -> int:
    """Queries of a chunk, where the mask takes ``row`` bytes a query."""
    B, H, T, _ = q.shape
    room = 2 * (q.nbytes + k.nbytes) * MASK_SHARE / row
    if T <= room:
        return T
    chunks = -(-T // max(step, step * -(-THREADGROUPS // (B * H)), int(room / 4)))
    return _up(-(-T // chunks), step)


def _padded(array: mx.array, length: int, value: int) -> mx.array:
    """With the second axis of that length."""
    missing = length - array.shape[1]
    return mx.pad(array, ((0, 0), (0, missing)), constant_values=value) if missing else array


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
