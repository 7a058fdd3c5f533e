"""Whether a kernel runs or plain MLX: one decision for each call, on record with its reason."""

from collections.abc import Callable, Sequence

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


def why_not_array(array: mx.array, head_sizes: Sequence[int]) -> str:
    """Why a kernel for heads does not take an array: its axes, dtype, head size or length.

    Args:
        array: (B, H, T, D) is what kernels take.
        head_sizes: the D that the kernel is written for.

    Returns:
        The reason, "" if there is none.
    """
    if array.ndim != 4:
        return f"{array.ndim} axes, not (B, H, T, D)"
    if array.dtype not in FLOATS:
        return f"dtype {str(array.dtype).removeprefix('mlx.core.')}"
    if array.shape[-1] not in head_sizes:
        return f"head size {array.shape[-1]}"
    if array.size >= 2**31:
        return f"{array.size} elements, more than 32 bits count"
    return ""


def why_not_heads(q: mx.array, k: mx.array, v: mx.array, head_sizes: Sequence[int]) -> str:
    """Why a kernel does not take queries, keys and values together.

    Args:
        q: (B, H, T, D) is what kernels take.
        k: (B, Hkv, N, D).
        v: (B, Hkv, N, D).
        head_sizes: the D that the kernel is written for.

    Returns:
        The reason, "" if there is none.
    """
    for array in (q, k, v):
        reason = why_not_array(array, head_sizes)
        if reason:
            return reason
        if array.dtype != q.dtype or array.shape[-1] != q.shape[-1]:
            return "queries, keys and values differ in dtype or head size"
    return ""
