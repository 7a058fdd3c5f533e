"""Stick-breaking attention over a prompt, newest keys first, until the sticks are used up."""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from .blocks import HEAD_SIZES, METAL, Blocks, heads_together
from .choice import choose_backend, why_not_array, why_not_scale
from .gradient import with_gradient_of
from .graphs import Graphs
from .kernel import Kernel, Launch
from .signature import CONSTANT_BELOW, constants
from .threadgroup_memory import block_bytes

KERNEL = Kernel("stick_breaking/attention.metal")

#: By backend, bytes of an element and head size. CUDA: the largest that keep all in registers.
BLOCKS = {
    ("metal", 2): METAL,
    ("metal", 4): METAL,
    ("cuda", 2): {
        64: Blocks(128, 64, 32, 2),
        80: Blocks(128, 64, 32, 2, True),
        96: Blocks(128, 64, 32, 2, True),
        128: Blocks(128, 48, 32, 2, True),
    },
    # at most 99 KB of shared memory, for cards that have no more
    ("cuda", 4): dict.fromkeys((64, 80), Blocks(128, 32, 16, 2, True))
    | {96: Blocks(128, 32, 16, 1, True), 128: Blocks(128, 16, 16, 1, True)},
}
#: elements behind the blocks, for the simdgroups to say whether anything is left
_FLAGS = 16


def stick_breaking(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    definition: Callable,
    attend_current: bool = False,
    begins: mx.array | None = None,
    output_dtype: mx.Dtype | None = None,
    product_form: bool = True,
    blocks: Blocks | None = None,
) -> tuple[mx.array, mx.array] | None:
    """Stick-breaking attention by ``metal/stick_breaking/attention.metal``, where it applies.

    Tan et al., Scaling Stick-Breaking Attention, arXiv 2410.17980: with beta = sigmoid(scale q k),
    query i at key j < i (j <= i with ``attend_current``) gets beta[i, j] times the product of
    1 - beta[i, l] over j < l < i.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128. As k and v, with
            any strides, and nothing is copied; read fast if rows are whole and begin at
            multiples of 16 bytes, as in slices of a cache.
        k: (B, Hkv, N, D), N >= T >= 1, Hkv divides H; the queries are the last T positions.
        v: (B, Hkv, N, D).
        scale: multiplies the logits, > 0.
        definition: the same in plain MLX, for the gradients:
            ``definition(q, k, v, scale=, attend_current=, mask=, output_dtype=)``.
        attend_current: whether a query's own key takes the first share.
        begins: (B,), int32: the first visible key of each row, as left padding leaves it; None
            where all are visible. Keys before it are not read, but for those in one block with it.
        output_dtype: float32, float16 or bfloat16; None for q's.
        product_form: products of 1 - beta; or else sums of their logarithms, slower.
        blocks: other block sizes than the backend's, to measure them.

    Returns:
        The output (B, H, T, D) and the remainder (B, H, T) in float32; None where
        plain MLX has to compute them. Sums are float32. Queries that stand together stop when
        at most 2^-29 is left of each stick, which changes an output by at most 2^-29 times the
        largest \\|v\\| and a remainder by at most 2^-29; so does the bound of 30 log(2) on logits
        in the product form.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = choose_backend(KERNEL, partial(_why_plain, q, k, v, scale, begins))
    if backend is None:
        return None
    blocks = blocks or BLOCKS[backend, q.dtype.size][q.shape[-1]]
    dtypes = q.dtype, output_dtype or q.dtype
    settings = (KERNEL, backend, float(scale), attend_current, product_form, blocks, dtypes)
    function = _graphs(definition, settings, q.shape, k.shape[1:3])
    return tuple(function(q, k, v) if begins is None else function(q, k, v, begins))


def _why_plain(q, k, v, scale, begins) -> str:
    """What the kernel cannot do of this call; "" if it can all."""
    for array in (q, k, v):
        reason = why_not_array(array, HEAD_SIZES)
        if reason:
            return reason
    if not q.dtype == k.dtype == v.dtype:
        return "dtypes that differ"
    B, H, T, D = q.shape
    together = k.shape == v.shape and k.shape[0] == B and k.shape[3] == D
    if 0 in (*q.shape, *k.shape) or not together or H % k.shape[1] or T > k.shape[2]:
        return f"shapes {q.shape}, {k.shape} and {v.shape}"
    if reason := why_not_scale(scale):
        return reason
    if not 0 < scale < math.inf:
        return f"scale {scale}"
    return why_not_begins(begins, B)


def why_not_begins(begins: mx.array | None, rows: int) -> str:
    """Why the kernels do not take first visible keys, int32 (B,) or None; "" if they do."""
    if begins is not None and (begins.shape != (rows,) or begins.dtype != mx.int32):
        return f"begins of shape {begins.shape} and dtype {begins.dtype}"
    return ""


def _function(definition, settings, shape, keys_shape):
    """Of q, k, v and perhaps begins: the launch, and with derivatives."""
    _, _, scale, attend_current, *_, (_, output_dtype) = settings
    options = {"scale": scale, "attend_current": attend_current, "output_dtype": output_dtype}

    def plain(q, k, v, begins=None):
        mask = None
        if begins is not None:
            mask = mx.arange(k.shape[2]) >= begins[:, None, None, None]
        return list(definition(q, k, v, mask=mask, **options))

    launch = _prepare(settings, shape, keys_shape)

    def launches(q, k, v, begins=None):
        return launch(q, k, v, device_begins(begins, shape[0]))

    return launches, with_gradient_of(plain, launches)


_graphs = Graphs(_function)


def _prepare(settings, shape, keys_shape) -> Launch:
    kernel, _, scale, attend_current, product_form, blocks, (dtype, output_dtype) = settings
    (B, H, T, D), (heads, N) = shape, keys_shape
    threads = blocks.queries // blocks.rows * 32
    wide = heads_together(B * H, 2 * N * D * dtype.size * heads // H)
    return kernel.prepare(
        template={
            "T": dtype,
            "O": output_dtype,
            "D": D,
            "BQ": blocks.queries,
            "BK": blocks.keys,
            "R": blocks.rows,
            "PAIRS": blocks.pairs,
            "STAGED": blocks.staged,
            "OWN": attend_current,
            "PRODUCT": product_form,
        },
        grid=(wide * threads, math.ceil(T / blocks.queries), B * H // wide),
        threadgroup=(threads, 1, 1),
        output_shapes=[shape, (B, H, T)],
        output_dtypes=[output_dtype, mx.float32],
        shared_memory=shared_bytes(blocks, D, dtype),
        numbers=[constants([T, N, H, H // heads], mx.int32), constants([scale], mx.float32)],
    )


def shared_bytes(blocks: Blocks, head_size: int, dtype: mx.Dtype) -> int:
    """Bytes of a threadgroup's memory on CUDA."""
    rows = 2 * blocks.pairs * blocks.keys + blocks.queries * blocks.staged
    return block_bytes(rows, head_size, dtype) + _FLAGS * dtype.size


def device_begins(begins: mx.array | None, rows: int) -> mx.array:
    """First visible keys (B,), or 0 for None, filled up as their address space wants: (B or 8,)."""
    if begins is None:
        return _zeros(max(rows, CONSTANT_BELOW))
    missing = CONSTANT_BELOW - rows
    return mx.concatenate([begins, _zeros(missing)]) if missing > 0 else begins


@lru_cache(maxsize=64)
def _zeros(count: int) -> mx.array:
    # no lazy array: it would belong to the thread that asked first
    return mx.array([0] * count, mx.int32)
