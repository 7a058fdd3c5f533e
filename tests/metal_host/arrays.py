"""Arrays of MLX as bytes, with their strides, and back."""

import ctypes
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .launching import INITIALISED, OUTSIDE, UNWRITTEN

_BFLOAT = mx.bfloat16


@dataclass
class Value:
    """An array in memory: what a kernel is given and leaves."""

    data: np.ndarray  # uint8, from the lowest element to the highest
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: mx.Dtype
    state: np.ndarray | None = None  # of each byte; None: all are initialised
    start: int = 0  # byte of the first element: not the lowest one where strides are negative

    @classmethod
    def of(cls, array: mx.array, row_contiguous: bool) -> "Value":
        """The array as it lies in memory, or as a copy that is row-contiguous."""
        view = _numpy(array)
        if row_contiguous or view.size == 0:
            data = np.frombuffer(np.ascontiguousarray(view).tobytes(), np.uint8)
            return cls(data, view.shape, row_strides(view.shape), array.dtype)
        steps = tuple(0 if n == 1 else s for n, s in zip(view.shape, view.strides, strict=True))
        lowest = sum(min(0, (n - 1) * s) for n, s in zip(view.shape, steps, strict=True))
        highest = sum(max(0, (n - 1) * s) for n, s in zip(view.shape, steps, strict=True))
        size = highest - lowest + view.itemsize
        raw = ctypes.string_at(view.ctypes.data + lowest, size)
        state = _touched(view.shape, steps, -lowest, view.itemsize, size)
        strides = tuple(s // view.itemsize for s in view.strides)
        data = np.frombuffer(raw, np.uint8)
        return cls(data, view.shape, strides, array.dtype, state, -lowest)

    @classmethod
    def output(cls, shape: tuple[int, ...], dtype: mx.Dtype, init_value: float | None) -> "Value":
        """All NaN and unwritten, or filled."""
        if init_value is not None:
            return cls.of(mx.full(shape, init_value).astype(dtype), row_contiguous=True)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.size
        data = np.full(size, 0xFF, np.uint8)
        return cls(data, shape, row_strides(shape), dtype, np.full(size, UNWRITTEN, np.uint8))

    def array(self) -> mx.array:
        """A row-contiguous value as MLX's array."""
        kind = np.uint16 if self.dtype == _BFLOAT else _numpy_dtype(self.dtype)
        array = mx.array(self.data.view(kind).reshape(self.shape))
        return array.view(_BFLOAT) if self.dtype == _BFLOAT else array


def write_back(data: np.ndarray, array: mx.array) -> None:
    """Bytes of a row-contiguous array become its content, in place."""
    view = np.array(array, copy=False)
    view[...] = data.view(view.dtype).reshape(view.shape)


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a row-contiguous array, in elements."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


def _numpy(array: mx.array) -> np.ndarray:
    """The array's own memory, bfloat as uint16."""
    return np.asarray(array.view(mx.uint16) if array.dtype == _BFLOAT else array)


def _numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    return np.array(mx.zeros((), dtype)).dtype


def _touched(shape, steps, start: int, itemsize: int, size: int) -> np.ndarray | None:
    """Between the elements of a slice lie bytes that are not the array's."""
    state = np.full(size, OUTSIDE, np.uint8)
    elements = np.lib.stride_tricks.as_strided(
        state[start:], (*shape, itemsize), (*steps, 1), writeable=True
    )
    elements[...] = INITIALISED
    return state if (state == OUTSIDE).any() else None
