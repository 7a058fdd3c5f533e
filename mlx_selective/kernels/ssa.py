"""Selective self-attention: rows times their temperatures, read once and written once."""

import math
from collections.abc import Callable
from functools import lru_cache, partial

import mlx.core as mx

from .choice import choose_backend, why_not_array
from .gradient import with_gradient_of
from .kernel import Kernel
from .signature import CONSTANT_BELOW, constants

TEMPERATURE = Kernel("ssa/temperature.metal")
#: head sizes D that the kernel is written for
HEAD_SIZES = (64, 80, 96, 128)
#: elements from which on it pays, by dtype (measured on an H200): in half precision plain MLX
#: copies to float32 and back, in float32 it is one kernel itself
SMALLEST = {mx.float16: 2**23, mx.bfloat16: 2**23, mx.float32: math.inf}
#: rows that a simdgroup takes, and simdgroups of a threadgroup
_ROWS, _SIMDGROUPS = 8, 4


def ssa_temperature(
    x: mx.array, tau: mx.array, plain: Callable, smallest: int | None = None
) -> mx.array | None:
    """Each row of x times its temperature, formed in float32, by the kernel where it applies.

    Args:
        x: (B, H, T, D), float32, float16 or bfloat16, with any strides.
        tau: (B, H, T, 1) or broadcastable to it.
        plain: the same function of x and tau in plain MLX, for the gradients.
        smallest: elements of x from which on the kernel runs; None for what pays.

    Returns:
        (B, H, T, D) in x's dtype, or None where plain MLX has to compute it.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    if choose_backend(TEMPERATURE, partial(_why_plain, x, tau, smallest)) is None:
        return None
    return _with_gradient(plain)(x, tau)


@lru_cache(maxsize=8)
def _with_gradient(plain: Callable) -> Callable:
    return with_gradient_of(plain, _launch)


def _why_plain(x: mx.array, tau: mx.array, smallest: int | None) -> str:
    """What the kernel cannot do of this call; "" if it can all."""
    reason = why_not_array(x, HEAD_SIZES)
    if reason:
        return reason
    rows = (*x.shape[:-1], 1)
    fits = all(have in (1, want) for have, want in zip(tau.shape[::-1], rows[::-1], strict=False))
    if tau.ndim > x.ndim or not fits:
        return f"temperatures {tau.shape} for rows {rows}"
    if x.size < (SMALLEST[x.dtype] if smallest is None else smallest):
        return f"{x.size} elements in {str(x.dtype).removeprefix('mlx.core.')} do not pay"
    if math.prod(rows) < CONSTANT_BELOW:
        return f"only {math.prod(rows)} rows"
    return ""


def _launch(x: mx.array, tau: mx.array) -> mx.array:
    B, H, T, D = x.shape
    rows = B * H * T
    threads = 32 * _SIMDGROUPS
    tau = mx.broadcast_to(tau, (B, H, T, 1)).astype(mx.float32).reshape(rows)
    (out,) = TEMPERATURE(
        inputs=[x, tau, _sizes(T)],
        template={"T": x.dtype, "D": D, "ROWS": _ROWS},
        grid=(math.ceil(T / (_SIMDGROUPS * _ROWS)) * threads, H, B),
        threadgroup=(threads, 1, 1),
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return out


@lru_cache(maxsize=64)
def _sizes(tokens: int) -> mx.array:
    """What the kernel reads from constant memory; kept, since making arrays takes time too."""
    return constants([tokens], mx.int32)
