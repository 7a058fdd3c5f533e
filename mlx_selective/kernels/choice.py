"""Whether a kernel runs or plain MLX: one decision for each call, on record with its reason."""

import math
from collections.abc import Callable
from functools import lru_cache
from numbers import Real

import mlx.core as mx

from .backend import find_backend
from .hooks import note
from .kernel import Kernel

#: dtypes of queries, keys and values that kernels are written for
FLOATS = (mx.float32, mx.float16, mx.bfloat16)


def choose_backend(kernel: Kernel, why_plain: Callable[[], str]) -> str | None:
    """The backend that a kernel is to run on, or None where plain MLX has to compute.

    Args:
        kernel: the kernel.
        why_plain: what the kernel cannot do of this call, "" if it can all; asked only where
            there is a backend.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = find_backend()
    reason = why_plain() if backend.name else backend.reason
    if not reason:
        return backend.name
    note(lambda: kernel.name, None, reason)
    return None


def why_not_array(array: mx.array, head_sizes: tuple[int, ...]) -> str:
    """Why a kernel for heads does not take an array: its axes, dtype, head size or length.

    Args:
        array: (B, H, T, D) is what kernels take.
        head_sizes: the D that the kernel is written for.

    Returns:
        The reason, "" if there is none.
    """
    return _why_not(array.shape, array.dtype, head_sizes)


def why_not_heads(q: mx.array, k: mx.array, v: mx.array, head_sizes: tuple[int, ...]) -> str:
    """Why a kernel does not take queries, keys and values together.

    Args:
        q: (B, H, T, D) is what kernels take.
        k: (B, Hkv, N, D).
        v: (B, Hkv, N, D).
        head_sizes: the D that the kernel is written for.

    Returns:
        The reason, "" if there is none.
    """
    return _why_not_together(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, head_sizes)


def why_not_scale(scale: float) -> str:
    """Why a kernel does not take what multiplies the logits: an array may have derivatives.

    Returns:
        The reason, "" if there is none.
    """
    # float first: asking whether it is a Real takes longer
    return "" if isinstance(scale, (float, Real)) else f"scale of type {type(scale).__name__}"


# Kept: a model asks the same for every layer and token.


@lru_cache(maxsize=1024)
def _why_not(shape, dtype, head_sizes) -> str:
    if len(shape) != 4:
        return f"{len(shape)} axes, not (B, H, T, D)"
    if dtype not in FLOATS:
        return f"dtype {str(dtype).removeprefix('mlx.core.')}"
    if shape[-1] not in head_sizes:
        return f"head size {shape[-1]}"
    size = math.prod(shape)
    if not size:
        return "no elements"
    return f"{size} elements, more than 32 bits count" if size >= 2**31 else ""


@lru_cache(maxsize=1024)
def _why_not_together(q, k, v, q_dtype, k_dtype, v_dtype, head_sizes) -> str:
    for shape, dtype in ((q, q_dtype), (k, k_dtype), (v, v_dtype)):
        reason = _why_not(shape, dtype, head_sizes)
        if reason:
            return reason
        if dtype != q_dtype or shape[-1] != q[-1]:
            return "queries, keys and values differ in dtype or head size"
    return ""
