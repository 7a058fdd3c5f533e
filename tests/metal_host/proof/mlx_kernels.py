"""Launches kernels that MLX ships as headers, other than attention, as MLX does on a Mac."""

import math
import struct
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest
from covering import covering, every

from .. import Library, Output, Report
from ..translation.building import MLX_INCLUDE
from .numbers import error, float64

FOLDER = "mlx/backend/metal/kernels"
TYPES = {
    mx.float32: "float",
    mx.float16: "half",
    mx.bfloat16: "bfloat16_t",
    mx.int32: "int",
    mx.int64: "int64_t",
}
FLOATS = [mx.float32, mx.float16, mx.bfloat16]
#: what MLX's own .metal files include and define before each header
_SYSTEM = "#include <metal_common>\n#include <metal_math>\n#include <metal_simdgroup>\n"
_BEFORE = ("defines.h", "utils.h")


def text(*headers: str, changes: Sequence[tuple[str, str]] = ()) -> str:
    """Source that includes headers of MLX; with `changes` (old, new), the last one's own text."""
    *first, last = headers
    lines = [f'#include "{FOLDER}/{name}"' for name in (*_BEFORE, *first)]
    content = f'#include "{FOLDER}/{last}"'
    if changes:
        content = (MLX_INCLUDE / FOLDER / last).read_text()
        for old, new in changes:
            assert old in content, f"{last} has no more: {old}"
            content = content.replace(old, new)
    return f"{_SYSTEM}using namespace metal;\n" + "\n".join([*lines, content, ""])


def launch(
    source: str,
    expression: str,
    buffers: list[mx.array | bytes | tuple | None],
    threadgroups: tuple[int, int, int],
    threads: tuple[int, int, int],
    seed: int = 0,
    constants: dict[int, object] | None = None,
) -> tuple[list[mx.array], Report]:
    """What the kernel writes; `buffers`: arrays, packed values, or outputs as (shape, dtype)."""
    library = Library(source, {"it": expression}, constants or {})
    given = [_bound(buffer) for buffer in buffers]
    report = library.launch("it", given, threadgroups, threads, seed)
    outputs = [
        _loaded(bound.array, buffer[1])
        for buffer, bound in zip(buffers, given, strict=True)
        if isinstance(bound, Output)
    ]
    assert not sum(report.unwritten.values()), report.unwritten
    return outputs, report


def packed(format_: str, *values) -> bytes:
    """A struct in little-endian order, without padding."""
    return struct.pack(f"<{format_}", *values)


def sizes(*values: int) -> list[bytes]:
    """Each a size_t or int64_t of its own."""
    return [packed("q", value) for value in values]


def strided(shape: Sequence[int], strides: Sequence[int]) -> list[bytes]:
    """An array's shape, strides and number of axes, three buffers."""
    n = len(shape)
    return [packed(f"{n}i", *shape), packed(f"{n}q", *strides), packed("i", n)]


def _bound(buffer):
    if isinstance(buffer, mx.array):
        return np.array(buffer.view(mx.uint16) if buffer.dtype == mx.bfloat16 else buffer)
    if isinstance(buffer, tuple):
        shape, dtype = buffer
        kind = np.uint16 if dtype == mx.bfloat16 else np.array(mx.zeros(1, dtype)).dtype
        return Output(np.zeros(shape, kind))
    return buffer


def _loaded(array: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(array).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(array)


# Cases


def random(shape: Sequence[int], dtype: mx.Dtype, seed: int = 0) -> mx.array:
    """Normally distributed; integers are eight times as wide."""
    values = mx.random.normal(shape, key=mx.random.key(seed))
    return (8 * values).astype(dtype) if dtype in (mx.int32, mx.int64) else values.astype(dtype)


def names(case: dict) -> str:
    """A case's id."""
    return "-".join(str(getattr(v, "__name__", v)).removeprefix("mlx.core.") for v in case.values())


def cases(factors: dict[str, list], **quick: list):
    """Parametrizes a test: a selection in the quick run, the full product in the slow one.

    `quick`: fewer values of some factors for the selection.
    """
    few = covering(factors | quick)
    rest = [row for row in every(factors) if row not in few]
    slow = [pytest.param(row, marks=pytest.mark.slow, id=names(row)) for row in rest]
    return pytest.mark.parametrize("case", [*(pytest.param(r, id=names(r)) for r in few), *slow])


# How near


#: relative error that the order of operations alone may make
FLOOR = {mx.float32: 3e-7, mx.float16: 2e-4, mx.bfloat16: 2e-3}


def assert_near(result: mx.array, by_mlx: mx.array, truth: np.ndarray | mx.array) -> None:
    """`by_mlx`: MLX's own on the processor; `truth`: of the same inputs in higher precision.

    Twice MLX's own error in this type may be made, and what the order of operations makes.
    """
    truth = float64(truth) if isinstance(truth, mx.array) else truth
    assert result.dtype == by_mlx.dtype and result.shape == by_mlx.shape == truth.shape
    if result.dtype not in FLOOR:
        assert mx.array_equal(result, by_mlx)
        return
    found, own = error(result, truth), error(by_mlx, truth)
    assert math.isfinite(own) and found <= 2 * own + FLOOR[result.dtype], (found, own)
