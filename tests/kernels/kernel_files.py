"""Kernel files for the tests, what MLX makes of a call, and a stand-in for one kernel."""

from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from methods import float64

from mlx_selective import kernels

#: a kernel with each kind of parameter; never compiled
SCALE_ROWS = """\
// Rows times their numbers. [[kernel]] void not_here(
#include "../tile/tile.h"

template <typename T, int D, bool TWICE>
[[kernel]] void scale_rows(
    const device T* x [[buffer(0)]],  // an input (with a comment)
    const constant int64_t* x_strides [[buffer(1)]],
    const device float* by [[buffer(2)]],
    const constant int* sizes [[buffer(3)]],
    device T* out [[buffer(4)]],
    uint3 thread_position_in_grid [[thread_position_in_grid]],
    uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {
  // "}" in a text, ')' and { in a comment
  const uint row = thread_position_in_grid.x;
  if (row < uint(sizes[0])) {
    out[row] = T(float(x[row * x_strides[0]]) * by[row] * (TWICE ? 2 : 1));
  }
}
"""
TILE = "#pragma once\n#include <metal_stdlib>\nstruct Tile {};\n"


def write(folder: Path, text: str = SCALE_ROWS, path: str = "rows/scale.metal", tile: str = TILE):
    """The path of a kernel file that includes a header, written under a folder."""
    for name, content in ((path, text), ("tile/tile.h", tile)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return path


def changed(old: str, new: str) -> str:
    """SCALE_ROWS with something else in one place."""
    assert SCALE_ROWS.count(old) == 1, old
    return SCALE_ROWS.replace(old, new)


def numpy_temperature(kernel, *, inputs, template, output_shapes, output_dtypes, **_):
    """What metal/ssa/temperature.metal computes, by the numbers that it is handed."""
    x, tau, sizes = inputs
    assert x.shape[2:] == (np.array(sizes)[0], dict(template)["D"])
    assert tau.shape == (x.size // x.shape[3],) and output_shapes == [x.shape]
    out = float64(x).astype(np.float32) * np.array(tau).reshape(*x.shape[:3], 1)
    return [mx.array(out).astype(output_dtypes[0])]


def generated(function, *arrays) -> list[str]:
    """The Metal text that MLX would compile for each kernel that a function launches."""
    texts = []

    def take(told):
        if told.get("name") == "CustomKernel":
            texts.append(told["arguments"][1])

    # MLX exports no graph that makes an array contiguous, and the text does not depend on it
    as_it_is = patch.object(mx, "contiguous", lambda array: array)
    with as_it_is, kernels.launched_by(lambda kernel, **call: kernel(**call)):
        mx.export_function(take, function, *arrays)
    return texts
