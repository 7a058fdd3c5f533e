"""One query of stick-breaking attention over a cache, newest keys first."""

from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from .blocks import HEAD_SIZES
from .choice import choose_backend, why_not_heads
from .gradient import with_gradient_of
from .kernel import Kernel
from .splits import SIMDGROUPS, share_keys

DECODE = Kernel("stick_breaking/decode.metal")
COMBINE = Kernel("stick_breaking/combine.metal")


def stick_breaking_decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    attend_current: bool,
    plain: Callable,
) -> tuple[mx.array, mx.array] | None:
    """One token of each row, by the kernels of ``metal/stick_breaking``, where they apply.

    One launch, two where there are more than 512 keys (arXiv 2410.17980). Keys are read newest
    first by each simdgroup, until at most 2^-29 is left of its stick.

    Args:
        q: (B, H, 1, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128.
        k: (B, Hkv, N, D) with any strides, such as a part of a cache; the last is the query's.
        v: (B, Hkv, N, D).
        scale: multiplies the logits.
        attend_current: whether the query's own key takes the first share.
        plain: the same function of q, k and v in plain MLX, for the gradients.

    Returns:
        The output (B, H, 1, D) in q's dtype and the remainder (B, H, 1) in float32, or None
        where plain MLX has to compute them.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    if choose_backend(DECODE, partial(_why_plain, q, k, v)) is None:
        return None
    launch = partial(_launch, scale=scale, end=k.shape[2] - (not attend_current))
    return tuple(with_gradient_of(plain, launch)(q, k, v))


def _why_plain(q: mx.array, k: mx.array, v: mx.array) -> str:
    """What the kernels cannot do of this call; "" if they can all."""
    reason = why_not_heads(q, k, v, HEAD_SIZES)
    if reason:
        return reason
    return "" if q.shape[2] == 1 else f"{q.shape[2]} queries"


def _launch(q, k, v, *, scale: float, end: int) -> list[mx.array]:
    (B, H, _, D), (_, Hkv, N, _) = q.shape, k.shape
    heads, keys, splits = share_keys(H // Hkv, N, D)
    split = splits > 1
    shapes = [q.shape, (B, H, 1)]
    out, remainder, *found = DECODE(
        inputs=[q, k, v, _zeros(max(B, 8)), *_numbers((N, H, Hkv, splits, keys, end), scale)],
        template={
            "T": q.dtype,
            "D": D,
            "HEADS": heads,
            "SIMDGROUPS": SIMDGROUPS,
            "SPLIT": split,
        },
        grid=(splits * SIMDGROUPS * 32, H // heads, B),
        threadgroup=(SIMDGROUPS * 32, 1, 1),
        output_shapes=[
            *([(1,), (1,)] if split else shapes),
            *([(B * H * splits * D,), (max(B * H * splits, 8),)] if split else [(1,), (1,)]),
        ],
        output_dtypes=[q.dtype, *[mx.float32] * 3],
        shared_memory=4 * SIMDGROUPS * heads * (D + 1),
    )
    if not split:
        return [out, remainder]
    return COMBINE(
        inputs=[*found, _numbers((splits,), scale)[0]],
        template={"T": q.dtype, "D": D},
        grid=(B * H * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=shapes,
        output_dtypes=[q.dtype, mx.float32],
    )


@lru_cache(maxsize=64)
def _zeros(count: int) -> mx.array:
    return mx.zeros((count,), mx.int32)


@lru_cache(maxsize=512)
def _numbers(sizes: tuple[int, ...], scale: float) -> tuple[mx.array, mx.array]:
    """What the kernels read from constant memory; kept, since making arrays takes time too."""
    return mx.array(sizes, mx.int32), mx.array([scale], mx.float32)
