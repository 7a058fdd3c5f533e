"""One query of selective attention over a cache: attention, the new F and the key to evict."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import mlx.core as mx

from .blocks import HEAD_SIZES
from .choice import choose_backend, why_not_heads, why_not_scale
from .gradient import with_gradient_of
from .graphs import Graphs
from .kernel import Kernel, Launch
from .signature import CONSTANT_BELOW, constants
from .splits import MOST_SPLITS, ahead, share_keys

DECODE = Kernel("selective/decode.metal")
SPLIT = Kernel("selective/decode_split.metal")
COMBINE = Kernel("selective/combine.metal")


def selective_decode(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    F: mx.array,
    *,
    scale: float,
    query_positions: mx.array,
    key_positions: mx.array,
    evicts: Sequence[int],
    definition: Callable,
) -> list[mx.array] | None:
    """One token of each row, by the kernels of ``metal/selective``, where they apply.

    One launch, two beyond 512 keys on Metal and 4096 on CUDA (arXiv 2410.02703: attention, F,
    and the choice of context pruning).

    Args:
        q: (B, H, 1, D), float32, float16 or bfloat16; D is 64, 80, 96 or 128.
        k: (B, Hkv, N, D) with any strides, such as a part of a cache.
        v: (B, Hkv, N, D).
        F: (B, N) float32, what earlier queries left on the keys.
        scale: multiplies the logits.
        query_positions: (B, 1) int32, negative for padding.
        key_positions: (B, N) int32, negative for padding and empty slots.
        evicts: for each row whether a key is to leave after this token.
        definition: the same in plain MLX, for the gradients:
            ``definition(q, k, v, F, query_positions, key_positions, scale=)``, which returns
            [output, F].

    Returns:
        [output (B, H, 1, D) in q's dtype, F (B, N) float32 after the query, slot (B, 1) int32],
        or None where plain MLX has to compute them. The slot holds the largest F, the oldest of
        equals, the first token and the newest staying; in a row that does not evict it is the
        slot with the smallest position, an empty one if there is one.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = choose_backend(DECODE, partial(_why_plain, q, k, v, scale))
    if backend is None:
        return None

    settings = (
        definition,
        (DECODE, SPLIT, COMBINE),
        backend,
        q.dtype,
        q.shape,
        k.shape[1:3],
        float(scale),
    )
    evicts = _padded(tuple(evicts))
    return _graphs(*settings)(q, k, v, F, query_positions, key_positions, evicts)


def _step(definition, kernels, backend, dtype, shape, keys_shape, scale):
    """Of the arrays: launches, and with derivatives."""
    first, second = _prepare(kernels, backend, dtype, shape, keys_shape, scale)
    plain = partial(definition, scale=scale)

    def launches(q, k, v, F, query_positions, key_positions, evicts):
        # at least eight of them, as device memory begins with; not copied
        own = mx.broadcast_to(query_positions, (shape[0], CONSTANT_BELOW))
        found = first(q, k, v, F, key_positions, own, evicts)
        if second is None:
            out, evicted, after = found
        else:
            after, parts = found
            out, evicted = second(parts)
        return [out, after, evicted]

    def function(*arrays):
        *moving, evicts = arrays
        values = partial(launches, evicts=evicts)
        return list(with_gradient_of(plain, values, outputs=2)(*moving))

    return launches, function


_graphs = Graphs(_step)


def _why_plain(q: mx.array, k: mx.array, v: mx.array, scale: float) -> str:
    """What the kernels cannot do of this call; "" if they can all."""
    reason = why_not_heads(q, k, v, HEAD_SIZES) or why_not_scale(scale)
    if reason:
        return reason
    if q.shape[2] != 1:
        return f"{q.shape[2]} queries"
    if k.shape[0] * k.shape[2] < CONSTANT_BELOW:
        return f"only {k.shape[0] * k.shape[2]} keys"
    return ""


@lru_cache(maxsize=64)
def _padded(numbers: tuple[int, ...]) -> mx.array:
    """As many as device memory begins with."""
    return mx.array([*numbers, *[0] * (CONSTANT_BELOW - len(numbers))], mx.int32)


def _prepare(kernels, backend, dtype, shape, keys_shape, scale) -> tuple[Launch, Launch | None]:
    """The launch, and that which makes its splits one, if there are several."""
    (B, H, _, D), (Hkv, N) = shape, keys_shape
    shares = share_keys(H // Hkv, B * H, N, D, backend)
    heads, simdgroups, keys, splits = shares
    found, results = B * H * splits * (D + 2), ([shape, (B, 1)], [dtype, mx.int32])
    if splits == 1:
        kernel, shapes, dtypes = kernels[0], [*results[0], (B, N)], [*results[1], mx.float32]
    else:
        kernel, shapes, dtypes = kernels[1], [(B, N), (found + 3 * B * splits,)], [mx.float32] * 2
    first = kernel.prepare(
        template={
            "T": dtype,
            "D": D,
            "HEADS": heads,
            "SIMDGROUPS": simdgroups,
            "AHEAD": ahead(backend, dtype),
        },
        **shares.threads(B, H),
        output_shapes=shapes,
        output_dtypes=dtypes,
        shared_memory=4 * simdgroups * (heads * (D + 2) + 3),
        numbers=[
            constants([N, H, Hkv, keys, splits, found], mx.int32),
            constants([scale], mx.float32),
        ],
    )
    if splits == 1:
        return first, None
    second = kernels[2].prepare(
        template={"T": dtype, "D": D, "MOST": MOST_SPLITS},
        grid=(B * H * 128, 1, 1),
        threadgroup=(128, 1, 1),
        output_shapes=results[0],
        output_dtypes=results[1],
        numbers=[constants([splits, H, found], mx.int32)],
    )
    return first, second
