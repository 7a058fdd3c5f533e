"""The stand-in's functions across a SIMD-group, its matrices and atomics, run as kernels."""

import mlx.core as mx
import numpy as np
import pytest

from metal_host.proof.header_kernels import FLOATS, evaluate, evaluate_all, rounded

LANES = np.arange(32)
DATA = np.random.default_rng(0).permutation(64).astype(np.float32)  # two SIMD-groups
ROWS = DATA.reshape(2, 32)


def across(expressions, data=DATA, out=mx.float32, **template):
    """What each expression of `x`, the lane's number, gives in the lanes of each SIMD-group."""
    results, report = evaluate_all(
        [f"metal::{e}" for e in expressions], data, setup="T x = T(a[i]);", out=out, **template
    )
    assert report.simd_operations > 0
    return results.reshape(len(expressions), -1, 32)


def per_simdgroup(values):
    return np.repeat(np.asarray(values)[:, None], 32, axis=1)


@pytest.mark.parametrize("kind", [*FLOATS, "int", "uint", "ushort"])
def test_reductions(kind):
    T = (FLOATS | {"int": mx.int32, "uint": mx.uint32, "ushort": mx.uint16})[kind]
    data = rounded(DATA / 8, kind) if kind in FLOATS else DATA
    rows = data.reshape(2, 32)
    sums = rounded(rows.sum(1), kind) if kind in FLOATS else rows.sum(1)
    results = across(["simd_sum(x)", "simd_max(x)", "simd_min(x)"], data, T=T)
    expected = [per_simdgroup(values) for values in (sums, rows.max(1), rows.min(1))]
    assert np.array_equal(results, expected)


def test_reductions_of_integers():
    whole = ROWS.astype(np.int64)
    operations = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    results = across([f"simd_{name}(x)" for name in operations], T=mx.int32)
    for operation, result in zip(operations.values(), results, strict=True):
        assert np.array_equal(result, per_simdgroup(operation.reduce(whole, axis=1))), operation


def test_prefixes():
    sums, products = np.cumsum(ROWS, axis=1), np.cumprod(ROWS.astype(np.int64) % 3 + 1, axis=1)
    names = ["inclusive_sum(x)", "exclusive_sum(x)", "inclusive_product(T(x % 3 + 1))"]
    results = across([f"simd_prefix_{name}" for name in names], out=mx.int64, T=mx.int64)
    assert np.array_equal(results, [sums, sums - ROWS, products])


@pytest.mark.parametrize("kind", FLOATS)
def test_shuffles(kind):
    lanes = {
        "simd_shuffle(x, ushort(31 - i % 32))": 31 - LANES,
        "simd_shuffle_xor(x, 9)": LANES ^ 9,
        "simd_shuffle_up(x, 5)": np.where(LANES < 5, LANES, LANES - 5),
        "simd_shuffle_down(x, 5)": np.where(LANES < 27, LANES + 5, LANES),
        "simd_shuffle_rotate_up(x, 5)": (LANES - 5) % 32,
        "simd_shuffle_rotate_down(x, 5)": (LANES + 5) % 32,
        "simd_broadcast(x, 7)": 0 * LANES + 7,
        "simd_broadcast_first(x)": 0 * LANES,
        "quad_broadcast(x, 2)": LANES // 4 * 4 + 2,
        "quad_shuffle_xor(x, 3)": LANES ^ 3,
        "quad_shuffle_up(x, 1)": LANES - (LANES % 4 > 0),
        "quad_shuffle_down(x, 1)": LANES + (LANES % 4 < 3),
    }
    for expression, result in zip(lanes, across(lanes, T=FLOATS[kind]), strict=True):
        assert np.array_equal(result, ROWS[:, lanes[expression]]), expression


@pytest.mark.parametrize("modulo", [32, 8])
def test_shuffles_with_filling(modulo):
    """The data of each group of lanes moves, and the filling's far end follows it."""
    groups = ROWS.reshape(2, -1, modulo)
    filling = -groups - 1
    up = np.concatenate([filling[..., -3:], groups[..., :-3]], -1)
    down = np.concatenate([groups[..., 3:], filling[..., :3]], -1)
    results = across(
        [f"simd_shuffle_and_fill_{way}(x, T(-x - 1), 3, {modulo})" for way in ("up", "down")],
        T=mx.float32,
    )
    assert np.array_equal(results, [up.reshape(2, 32), down.reshape(2, 32)])


def test_vectors_cross_the_simdgroup():
    source = """
      float4 x = float4(a[i], 2 * a[i], 3, 4);
      float4 y = metal::simd_shuffle_xor(x, 1) + metal::simd_sum(x);
      out[i] = y.y;"""
    result, _ = evaluate(source, DATA)
    expected = 2 * ROWS[:, LANES ^ 1] + 2 * per_simdgroup(ROWS.sum(1))
    assert np.array_equal(result.reshape(2, 32), expected)


def test_votes():
    low = ROWS < 20
    bits = per_simdgroup((low.astype(np.uint64) << LANES.astype(np.uint64)).sum(1))
    ballot, everyone, anyone, first = across(
        [
            "simd_vote::vote_t(metal::simd_ballot(x < 20))",
            "simd_all(x >= 0) && !metal::simd_all(x < 20)",
            "simd_any(x < 20) && !metal::simd_any(x < 0)",
            "simd_is_first()",
        ],
        out=mx.uint64,
        T=mx.int32,
    )
    assert np.array_equal(ballot, bits)
    assert everyone.all() and anyone.all()
    assert np.array_equal(first[0], LANES == 0)


def test_quads_reduce():
    quads = ROWS.reshape(2, 8, 4)
    expected = [np.repeat(values, 4, axis=1) for values in (quads.sum(2), quads.max(2))]
    assert np.array_equal(across(["quad_sum(x)", "quad_max(x)"], T=mx.int32), expected)


def test_lanes_that_returned_take_no_part():
    source = "if (i % 32 >= 20) { out[i] = -1; return; } out[i] = metal::simd_sum(a[i]);"
    result, _ = evaluate(source, DATA)
    expected = np.where(LANES < 20, per_simdgroup(ROWS[:, :20].sum(1)), -1)
    assert np.array_equal(result.reshape(2, 32), expected)


# Matrices

HEADER = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
MATRIX = np.arange(64, dtype=np.float32).reshape(8, 8)


def matrices(source, *inputs, count=64, **template):
    return evaluate(source, *inputs, count=count, threads=32, header=HEADER, **template)


def test_matrix_layout():
    """A lane holds two neighbours of a row, where MLX's kernels expect them."""
    source = """
      simdgroup_float8x8 m;
      simdgroup_load(m, a);
      out[2 * i] = m.thread_elements()[0];
      out[2 * i + 1] = m.thread_elements()[1];"""
    result, report = matrices(source, MATRIX)
    qid = LANES // 4
    row = (qid & 4) + LANES // 2 % 4
    column = (qid & 2) * 2 + LANES % 2 * 2
    expected = np.stack([MATRIX[row, column], MATRIX[row, column + 1]], axis=1)
    assert np.array_equal(result, expected.ravel())
    assert report.device_read["a"] == 256


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("transposed", [False, True])
def test_matrix_load_and_store(kind, transposed):
    """From a tile of a wider matrix in device memory, through threadgroup memory."""
    flag = str(transposed).lower()
    source = f"""
      threadgroup T tile[8 * 10];
      simdgroup_matrix<T, 8, 8> m, n;
      simdgroup_load(m, a, 20, ulong2(5, 2), {flag});
      simdgroup_store(m, tile, 10);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_load(n, tile, 10);
      simdgroup_store(n, out, 8, ulong2(0, 0), {flag});"""
    data = np.arange(240, dtype=np.float32).reshape(12, 20)
    result, _ = evaluate(
        source, mx.array(data).astype(FLOATS[kind]), out=FLOATS[kind], count=64, threads=32,
        header=HEADER, T=FLOATS[kind],
    )  # fmt: skip
    assert np.array_equal(result.reshape(8, 8), data[2:10, 5:13])


@pytest.mark.parametrize("accumulator", FLOATS)
@pytest.mark.parametrize("kind", FLOATS)
def test_matrix_product(kind, accumulator):
    """In float, one product after the other, rounded at the end."""
    rng = np.random.default_rng(5)
    a, b = (rounded(rng.normal(size=(8, 8)), kind) for _ in range(2))
    c = rounded(rng.normal(size=(8, 8)), accumulator)
    source = """
      simdgroup_matrix<T, 8, 8> x, y;
      simdgroup_matrix<A, 8, 8> z;
      for (int n = 0; n < 2; n++) {
        short qid = i / 4, row = (qid & 4) + i / 2 % 4, column = (qid & 2) * 2 + i % 2 * 2 + n;
        x.thread_elements()[n] = T(a[8 * row + column]);
        y.thread_elements()[n] = T(b[8 * row + column]);
        z.thread_elements()[n] = A(c[8 * row + column]);
      }
      simdgroup_multiply_accumulate(z, x, y, z);
      simdgroup_store(z, out);"""
    result, report = matrices(
        source, a, b, c, T=FLOATS[kind], A=FLOATS[accumulator], out=FLOATS[accumulator]
    )
    expected = c.copy()
    for k in range(8):
        expected += a[:, k, None] * b[k]
    assert np.array_equal(result.reshape(8, 8), rounded(expected, accumulator))
    assert report.multiply_accumulates == 512


def test_matrix_makers_and_operators():
    source = """
      auto identity = make_diagonal_simdgroup_matrix<float, 8, 8>(3.0f);
      auto ones = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
      simdgroup_float8x8 m, product;
      simdgroup_load(m, a);
      simdgroup_multiply(product, identity, m * ones);
      simdgroup_store(product, out);"""
    result, report = matrices(source, MATRIX)
    assert np.array_equal(result.reshape(8, 8), 3 * MATRIX @ np.ones((8, 8)))
    assert report.multiply_accumulates == 1024


# Atomics


def test_atomics():
    source = """
      threadgroup atomic_uint counts[4];
      threadgroup atomic<float> total;
      if (i < 4) atomic_store_explicit(&counts[i], 0u, memory_order_relaxed);
      if (i == 0) atomic_store_explicit(&total, 0.0f, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint value = a[i];
      atomic_fetch_add_explicit(&counts[0], 1, memory_order_relaxed);
      atomic_fetch_max_explicit(&counts[1], value, memory_order_relaxed);
      atomic_fetch_or_explicit(&counts[2], value, memory_order_relaxed);
      uint old = atomic_load_explicit(&counts[3], memory_order_relaxed);
      while (!atomic_compare_exchange_weak_explicit(
          &counts[3], &old, old + value, memory_order_relaxed, memory_order_relaxed)) {}
      atomic_fetch_add_explicit(&total, 0.5f, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      if (i < 4) out[i] = atomic_load_explicit(&counts[i], memory_order_relaxed);
      if (i == 4) out[i] = atomic_load_explicit(&total, memory_order_relaxed);"""
    result, _ = evaluate(source, DATA, count=5, threads=64, header=HEADER)
    assert result.tolist() == [64, 63, 63, 2016, 32]
