"""One query of stick-breaking attention over a cache, newest keys first."""

from collections.abc import Callable
from functools import partial

import mlx.core as mx

from .blocks import HEAD_SIZES
from .choice import choose_backend, why_not_heads, why_not_scale
from .gradient import with_gradient_of
from .graphs import Graphs
from .kernel import Kernel, Launch
from .signature import constants
from .splits import MOST_SPLITS, ahead, share_keys
from .stick_breaking import device_begins, why_not_begins

DECODE = Kernel("stick_breaking/decode.metal")
SPLIT = Kernel("stick_breaking/decode_split.metal")
COMBINE = Kernel("stick_breaking/combine.metal")


def stick_breaking_decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    attend_current: bool,
    definition: Callable,
    begins: mx.array | None = None,
    output_dtype: mx.Dtype | None = None,
) -> tuple[mx.array, mx.array] | None:
    """One token of each row, by the kernels of ``metal/stick_breaking``, where they apply.

    One launch, two beyond 512 keys on Metal and 4096 on CUDA (arXiv 2410.17980). Keys are read
    newest first by each simdgroup, until at most 2^-29 is left of its stick.

    Args:
        q: (B, H, 1, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128.
        k: (B, Hkv, N, D) with any strides, such as a part of a cache; the last is the query's.
        v: (B, Hkv, N, D).
        scale: multiplies the logits.
        attend_current: whether the query's own key takes the first share.
        definition: the same in plain MLX, for the gradients:
            ``definition(q, k, v, scale=, attend_current=, begins=, output_dtype=)``.
        begins: (B,), int32: the first visible key of each row, as left padding leaves it; None
            where all are visible. Keys before it are not read, but for those in one block with it.
        output_dtype: float32, float16 or bfloat16; None for q's.

    Returns:
        The output (B, H, 1, D) and the remainder (B, H, 1) in float32, or None where plain MLX
        has to compute them.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = choose_backend(DECODE, partial(_why_plain, q, k, v, scale, begins))
    if backend is None:
        return None
    dtypes, shapes = (q.dtype, output_dtype or q.dtype), (q.shape, k.shape[1:3])
    function = _graphs(
        definition, (DECODE, SPLIT, COMBINE), backend, dtypes, *shapes, float(scale), attend_current
    )
    return tuple(function(q, k, v) if begins is None else function(q, k, v, begins))


def _step(definition, kernels, backend, dtypes, shape, keys_shape, scale, attend_current):
    """Of q, k, v and perhaps begins: launches, and with derivatives."""
    options = {"scale": scale, "attend_current": attend_current, "output_dtype": dtypes[1]}
    end = keys_shape[1] - (not attend_current)
    first, second = _prepare(kernels, backend, dtypes, shape, keys_shape, end, scale)

    def plain(q, k, v, begins=None):
        return list(definition(q, k, v, begins=begins, **options))

    def launches(q, k, v, begins=None):
        found = first(q, k, v, device_begins(begins, shape[0]))
        return found if second is None else second(*found)

    return launches, with_gradient_of(plain, launches)


_graphs = Graphs(_step)


def _why_plain(q, k, v, scale: float, begins: mx.array | None) -> str:
    """What the kernels cannot do of this call; "" if they can all."""
    reason = why_not_heads(q, k, v, HEAD_SIZES) or why_not_scale(scale)
    if reason:
        return reason
    return why_not_begins(begins, q.shape[0]) if q.shape[2] == 1 else f"{q.shape[2]} queries"


def _prepare(
    kernels, backend, dtypes, shape, keys_shape, end, scale
) -> tuple[Launch, Launch | None]:
    """The launch, and that which makes its splits one, if there are several."""
    (B, H, _, D), (Hkv, N), (dtype, output_dtype) = shape, keys_shape, dtypes
    shares = share_keys(H // Hkv, B * H, N, D, backend)
    heads, simdgroups, keys, splits = shares
    results = [shape, (B, H, 1)], [output_dtype, mx.float32]
    template = {
        "T": dtype,
        "D": D,
        "HEADS": heads,
        "SIMDGROUPS": simdgroups,
        "AHEAD": ahead(backend, dtype),
    }
    if splits == 1:
        kernel, shapes, dtypes = kernels[0], *results
        template["O"] = output_dtype
    else:
        kernel, shapes, dtypes = kernels[1], [(B, H, splits, D + 1)], [mx.float32]
    first = kernel.prepare(
        template=template,
        **shares.threads(B, H),
        output_shapes=shapes,
        output_dtypes=dtypes,
        shared_memory=4 * simdgroups * heads * (D + 1),
        numbers=[
            constants([N, H, Hkv, end, keys, splits], mx.int32),
            constants([scale], mx.float32),
        ],
    )
    if splits == 1:
        return first, None
    second = kernels[2].prepare(
        template={"O": output_dtype, "D": D, "MOST": MOST_SPLITS},
        grid=(B * H * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=results[0],
        output_dtypes=results[1],
        numbers=[constants([splits], mx.int32)],
    )
    return first, second
