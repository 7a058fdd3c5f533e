"""Rows, scans, reductions and element-wise kernels of MLX's wheel agree with MLX on the processor.

MLX ships rms_norm.metal and rope.metal only inside its compiled library, not as text: RMS norm and
rotary embedding are proved by kernels of our own (test_our_rows.py).
"""

import mlx.core as mx
import numpy as np
import pytest

from metal_host import Fault
from metal_host.proof.mlx_kernels import (
    FLOATS,
    TYPES,
    assert_near,
    cases,
    launch,
    names,
    packed,
    random,
    sizes,
    strided,
    text,
)
from metal_host.proof.numbers import float64
from metal_host.proof.versions import seen_in


def simdgroups(n: int) -> int:
    """Threads, in whole simdgroups, that n take."""
    return -(-n // 32) * 32


# Softmax and the logarithm of a sum of exponentials

ROWS = {
    "dtype": FLOATS,
    "kernel": ["softmax_single_row", "softmax_looped", "logsumexp", "logsumexp_looped"],
    "axis": [1, 100, 517],
}
LONG = [
    {"dtype": mx.float16, "kernel": k, "axis": 4500} for k in ("softmax_looped", "logsumexp_looped")
]


def run_rows(dtype, kernel, axis, seed=0):
    name, rows = kernel.split("_")[0], 3
    x = 3 * random((rows, axis), dtype, seed)
    # The looped kernels read a value of each of 32 simdgroups: MLX starts all of them.
    threads = 1024 if kernel.endswith("looped") else simdgroups(-(-axis // 4))
    out = ((rows, axis) if name == "softmax" else (rows, 1), dtype)
    source = "#define SOFTMAX_N_READS 4\n" + text(f"{name}.h")
    expression = f"{kernel}<{TYPES[dtype]}, float, 4>"
    given = [x, out, packed("i", axis)]
    (result,), report = launch(source, expression, given, (rows, 1, 1), (threads, 1, 1), seed)
    z = float64(x)
    lse = np.logaddexp.reduce(z, 1, keepdims=True)
    if name == "softmax":
        assert_near(result, mx.softmax(x, -1, precise=True), np.exp(z - lse))
    else:
        assert_near(result, mx.logsumexp(x, -1, keepdims=True), lse)
    return report


@cases(ROWS)
def test_rows(case):
    run_rows(**case)


@pytest.mark.parametrize("case", LONG, ids=names)
def test_long_rows(case):
    run_rows(**case, seed=1)


def test_rows_do_not_depend_on_the_order():
    reports = [run_rows(mx.float32, "softmax_single_row", 517, seed) for seed in range(8)]
    assert all(report == reports[0] for report in reports)
    assert reports[0].device_read["in"] == reports[0].device_written["out"] == 3 * 517 * 4
    assert reports[0].barriers == 3 * 5


# Scans

SCANS = {
    "dtype": [*FLOATS, mx.int32],
    "strided": [False, True],
    "inclusive": [True, False],
    "reverse": [False, True],
}


def run_scan(dtype, strided, inclusive, reverse, shape=(2, 77, 40), seed=0):
    A, N, C = shape
    x = random(shape if strided else (A, C, N), dtype, seed)
    type_, flags = TYPES[dtype], f"{inclusive}, {reverse}".lower()
    expression = f"_scan<{type_}, {type_}, CumSum<{type_}>, 4, {flags}>"
    given, source = [x, (x.shape, dtype), *sizes(N)], text("binary_ops.h", "scan.h")
    if strided:
        blocks = -(-C // 32)
        given += sizes(C, blocks)
        kernel, grid, threads = "strided", (1, A * blocks, 1), 256
    else:
        # Fewer than 32 simdgroups: see test_what_the_detector_finds_in_mlx.
        kernel, grid, threads = "contiguous", (1, A * C, 1), 1024
    (result,), report = launch(source, kernel + expression, given, grid, (threads, 1, 1), seed)
    options = {"axis": 1 if strided else 2, "inclusive": inclusive, "reverse": reverse}
    assert_near(result, mx.cumsum(x, **options), cumulated(float64(x), **options))
    return report


def cumulated(x: np.ndarray, axis: int, inclusive: bool, reverse: bool) -> np.ndarray:
    x = np.flip(x, axis) if reverse else x
    sums = np.cumsum(x, axis)
    sums = sums if inclusive else sums - x
    return np.flip(sums, axis) if reverse else sums


@cases(SCANS, dtype=[mx.float32, mx.float16, mx.int32])
def test_scan(case):
    run_scan(**case)


def test_a_scan_longer_than_its_threadgroup():
    for reverse in (False, True):
        run_scan(mx.float32, False, reverse, reverse, (1, 5000, 2), seed=2)


@pytest.mark.parametrize("strided", [False, True])
def test_scans_do_not_depend_on_the_order(strided):
    reports = [run_scan(mx.float32, strided, True, False, (1, 77, 40), s) for s in range(4)]
    assert all(report == reports[0] for report in reports)


# Reductions

REDUCTIONS = {
    "dtype": [*FLOATS, mx.int32],
    "kernel": [
        "row_simple",
        "row_looped",
        "row_small",
        "col_looped",
        "col_small",
        "col_longcolumn",
    ],
    "operation": ["Sum", "Max"],
}


def reduction_layout(kernel: str) -> tuple:
    """Threads of a threadgroup, threadgroups, template arguments, reduced axes, buffers."""
    columns = _columns(8)
    rows = [*sizes(40, 3), *strided((2, 8), (960, 40)), *strided((3,), (320,))]
    return {
        "row_simple": ((32, 1, 1), (1, 12, 1), "", (3,), sizes(40, 48)),
        "row_looped": ((64, 1, 1), (1, 16, 1), ", int, 1", (1, 3), rows),
        "row_small": ((16, 1, 1), (1, 1, 1), ", int, 1", (1, 3), rows),
        "col_looped": ((256, 1, 1), (2, 6, 1), ", int, 1, 32, 32", (2,), [*columns, *sizes(1, 0)]),
        "col_small": ((10, 4, 1), (1, 6, 1), ", int, 1", (2,), [*columns, *sizes(1)]),
        "col_longcolumn": ((40, 4, 1), (6, 1, 1), ", int, 1", (2,), [*columns, *sizes(1, 240)]),
    }[kernel]


def run_reduction(dtype, kernel, operation, seed=0):
    x = random((2, 3, 8, 40), dtype, seed)
    type_ = TYPES[dtype]
    accumulated = "float" if dtype in FLOATS and operation == "Sum" else type_
    threads, grid, more, axes, given = reduction_layout(kernel)
    name = kernel.replace("_", "_reduce_")
    out_type = mx.float32 if accumulated == "float" else dtype
    kept = tuple(n for axis, n in enumerate(x.shape) if axis not in axes)
    source = text("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h")
    expression = f"{name}<{type_}, {accumulated}, {operation}<{accumulated}>{more}>"
    buffers = [x, (kept, out_type), *given]
    (result,), report = launch(source, expression, buffers, grid, threads, seed)
    raised = x if dtype == mx.int32 else x.astype(mx.float32)
    by_mlx = {"Sum": mx.sum, "Max": mx.max}[operation](raised, axes)
    truth = {"Sum": np.sum, "Max": np.max}[operation](float64(x), axes)
    assert_near(result, by_mlx.astype(out_type), truth)
    return report


def _columns(n: int) -> list[bytes]:
    """Axis 2 of (2, 3, n, 40) is reduced: sizes, what is kept, what is reduced."""
    return [*sizes(n, 40), *strided((6,), (n * 40,)), *strided((n,), (40,))]


@cases(REDUCTIONS, dtype=[mx.float32, mx.bfloat16])
def test_reduction(case):
    run_reduction(**case)


@pytest.mark.parametrize("kernel", ["row_simple", "col_looped"])
def test_reductions_do_not_depend_on_the_order(kernel):
    reports = [run_reduction(mx.float32, kernel, "Sum", seed) for seed in range(6)]
    assert all(report == reports[0] for report in reports)
    assert reports[0].device_read["in"] == 2 * 3 * 8 * 40 * 4


# Element by element


@pytest.mark.parametrize("dtype", [mx.float32, mx.int32])
def test_arange(dtype):
    start, step = (packed("f" if dtype == mx.float32 else "i", v) for v in (3, 2))
    given = [start, step, ((100,), dtype)]
    (result,), _ = launch(text("arange.h"), f"arange<{TYPES[dtype]}>", given, (5, 1, 1), (20, 1, 1))
    assert mx.array_equal(result, mx.arange(3, 203, 2, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unary(dtype):
    x, type_, n = random((101,), dtype), TYPES[dtype], 8 // dtype.size
    given = [x, (x.shape, dtype), packed("I", 101)]
    source, grid = text("unary_ops.h", "unary.h"), (-(-101 // n), 1, 1)
    (result,), report = launch(source, f"unary_v<{type_}, {type_}, Exp>", given, grid, (1, 1, 1))
    assert_near(result, mx.exp(x), np.exp(float64(x)))
    assert report.special_functions == 101


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_binary(dtype):
    a, b, n = random((101,), dtype), random((101,), dtype, 1), 8 // dtype.size
    given = [a, b, (a.shape, dtype), packed("I", 101)]
    source, grid = text("binary_ops.h", "binary.h"), (-(-101 // n), 1, 1)
    expression = f"binary_vv<{TYPES[dtype]}, {TYPES[dtype]}, Multiply>"
    (result,), _ = launch(source, expression, given, grid, (1, 1, 1))
    assert mx.array_equal(result, a * b)


# What MLX's own kernels do that Metal does not promise to be right


@seen_in("mlx", "0.32.4")
def test_a_scan_of_few_simdgroups_reads_what_nobody_wrote():
    """Its first simdgroup scans 32 sums, whether or not 32 simdgroups wrote one.

    The results are right: only later lanes get to see what was unwritten.
    """
    x = random((1, 100), mx.float32)
    given = [x, (x.shape, mx.float32), *sizes(100)]
    expression = "contiguous_scan<float, float, CumSum<float>, 4, true, false>"
    with pytest.raises(Fault, match="simdgroup_sums") as caught:
        launch(text("binary_ops.h", "scan.h"), expression, given, (1, 1, 1), (32, 1, 1))
    assert caught.value.kind == "uninitialised read"
    assert "op.simd_exclusive_scan(simdgroup_sums[simd_lane_id])" in caught.value.where


@seen_in("mlx", "0.32.4")
def test_rows_that_two_threadgroups_reduce():
    """Four at a time, and the last four overlap: the same sums are written twice."""
    x = random((6, 40), mx.float32)
    source = text("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h")
    given = [x, ((6,), mx.float32), *sizes(40, 6)]
    with pytest.raises(Fault, match="device buffer `out`") as caught:
        launch(source, "row_reduce_simple<float, float, Sum<float>>", given, (1, 2, 1), (32, 1, 1))
    assert caught.value.kind == "race"
    assert caught.value.threadgroup != caught.value.other_threadgroup


@seen_in("mlx", "0.32.4")
def test_columns_that_end_inside_a_threadgroup():
    """Threads beyond the last column return, and the others come to a barrier."""
    x = random((2, 3, 8, 40), mx.float32)
    source = text("atomic.h", "reduction/ops.h", "reduce_utils.h", "reduce.h")
    given = [x, ((2, 3, 40), mx.float32), *_columns(8), *sizes(1)]
    with pytest.raises(Fault) as caught:
        launch(
            source,
            "col_reduce_small<float, float, Sum<float>, int, 1>",
            given,
            (1, 6, 1),
            (16, 4, 1),
        )
    assert caught.value.kind == "divergent barrier"
