"""MLX's steel matrix product from its wheel agrees with MLX on the processor."""

import mlx.core as mx
import pytest

from metal_host import Fault
from metal_host.proof.mlx_kernels import (
    FLOATS,
    TYPES,
    assert_near,
    cases,
    launch,
    packed,
    random,
    text,
)
from metal_host.proof.numbers import float64
from metal_host.proof.versions import seen_in

BM, BN, BK = 32, 32, 16
SOURCE = text("steel/gemm/gemm.h", "steel/gemm/kernels/steel_gemm_fused.h")
PRODUCTS = {
    "dtype": FLOATS,
    "ta": [False, True],
    "tb": [False, True],
    "addend": [None, "add", "axpby"],
    "MNK": [(64, 32, 32), (40, 37, 50), (64, 37, 9), (40, 32, 24)],
}


def launch_gemm(a, b, c, ta, tb, addend, alpha, beta, MNK, seed):
    """`c`: flat, of M x N elements a batch at least; None: nothing is added."""
    (M, N, K), batch, dtype = MNK, a.shape[0], a.dtype
    tiles = (-(-N // BN), -(-M // BM), batch)
    params = packed(
        "8i3q3i4x",
        *(M, N, K),
        *(M if ta else K, K if tb else N, N),  # leading dimensions
        *tiles[:2],
        *(M * K, K * N, M * N),  # strides of the batch
        *(0, K // BK, 1),  # swizzle, whole blocks of K, axes of the batch
    )
    constants = {
        10: False,  # has_batch: strides of several axes
        100: addend is not None,
        110: addend == "axpby",
        200: M % BM == 0,
        201: N % BN == 0,
        202: K % BK == 0,
    }
    # The kernel loads alpha and beta even where nothing is added.
    added = packed("2iq2f", N, 1, M * N, alpha, beta)
    given = [a, b, c, ((batch, M, N), dtype), params, added]
    flags = f"{ta}, {tb}".lower()
    expression = f"gemm<{TYPES[dtype]}, {BM}, {BN}, {BK}, 2, 2, {flags}, float>"
    return launch(SOURCE, expression, given, tiles, (32, 2, 2), seed, constants)


def run(dtype, ta, tb, addend, MNK, batch=1, seed=0, rows_after=BM):
    M, N, K = MNK
    shapes = [(K, M) if ta else (M, K), (N, K) if tb else (K, N), (M, N)]
    a, b, c = (random((batch, *shape), dtype, seed + n) for n, shape in enumerate(shapes))
    alpha, beta = (0.5, -1.5) if addend == "axpby" else (1, 1)
    # C is read beyond its last row: see test_an_addend_is_read_beyond_its_end.
    c_longer = mx.concatenate([c.flatten(), mx.zeros(rows_after * N, dtype)]) if addend else None
    (result,), report = launch_gemm(a, b, c_longer, ta, tb, addend, alpha, beta, MNK, seed)
    left, right = (x.swapaxes(1, 2) if turned else x for x, turned in ((a, ta), (b, tb)))
    truth = alpha * (float64(left) @ float64(right)) + (beta * float64(c) if addend else 0)
    by_mlx = mx.addmm(c, left, right, alpha, beta) if addend else left @ right
    assert_near(result, by_mlx, truth)
    tiles, padded = batch * -(-N // BN) * -(-M // BM), -(-K // BK) * BK
    products = tiles * BM * BN * padded
    scaled = tiles * BM * BN if addend == "axpby" else 0  # some, where a tile is not full
    assert products <= report.multiply_accumulates <= products + scaled
    return report


@cases(PRODUCTS, MNK=[(64, 32, 32), (40, 37, 50), (64, 37, 9)])
def test_product(case):
    run(**case, batch=1 + sum(case["MNK"]) % 2)


def test_order_and_bytes():
    reports = [run(mx.float16, False, False, None, (64, 32, 32), seed=s) for s in range(6)]
    assert all(report == reports[0] for report in reports)
    # Each of the two rows of tiles reads its half of A, and all of B.
    assert reports[0].device_read["A"] == 2 * 64 * 32
    assert reports[0].device_read["B"] == 2 * 2 * 32 * 32
    assert reports[0].device_written["D"] == 2 * 64 * 32
    assert reports[0].barriers == 2 * (2 * 2 + 2)
    assert reports[0].threadgroup_memory == 2 * (BM * (BK + 8) + BK * (BN + 8))


@seen_in("mlx", "0.32.4")
def test_an_addend_is_read_beyond_its_end():
    """A mistake of MLX's that no result shows: apply_epilogue_safe looks at C's columns only."""
    with pytest.raises(Fault, match="device buffer `C`") as caught:
        run(mx.float32, False, False, "add", (40, 37, 50), rows_after=0)
    assert caught.value.kind == "out of bounds"
    assert "c_elems[k] = C[offset_c + k * fdc]" in caught.value.where
