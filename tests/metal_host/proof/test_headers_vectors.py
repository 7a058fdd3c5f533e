"""The stand-in's vectors, and structs in the address spaces, run as kernels."""

import math

import mlx.core as mx
import numpy as np
import pytest

from metal_host.proof.header_kernels import FLOATS, evaluate, rounded


@pytest.mark.parametrize("kind", ["float", "half", "bfloat", "int", "uint", "short"])
def test_vector_arithmetic(kind):
    types = FLOATS | {"int": mx.int32, "uint": mx.uint32, "short": mx.int16}
    a = np.arange(1, 9, dtype=np.float32)
    source = """
      typedef metal::vec<T, 2> V;
      V x = metal::vec<T, 2>(T(a[2 * i]), T(a[2 * i + 1]));
      V y = x * x + T(3);
      y -= x;
      y.x += y.y;
      y = y / x;
      out[2 * i] = float(y[0]);
      out[2 * i + 1] = float(y[1]);"""
    result, _ = evaluate(source, a, threads=4, count=8, T=types[kind])
    x = a.reshape(4, 2)
    y = x * x + 3 - x
    y[:, 0] += y[:, 1]
    y /= x
    y = rounded(y, kind) if kind in FLOATS else np.trunc(y)
    assert np.array_equal(result, y.ravel())


def test_vector_construction_and_swizzles():
    source = """
      float2 p = float2(1, 2);
      float3 q = float3(p, 3);
      float4 r = float4(p.yx, q.zx);
      r.xw = r.wx;
      float4 s = float4(7.0f);
      int4 t = int4(r);
      uint2 u = uint2(3.9f, 4);
      half4 h = half4(half2(p), half(5), 6.0h);
      r = i == 0 ? r : i == 1 ? s : i == 2 ? float4(t) + 0.5f : i == 3 ? float4(h)
        : i == 4 ? float4(float2(u), q.yz) : float4(as_type<float2>(as_type<ulong>(p)), 0, 0);
      out[4 * i] = r.x, out[4 * i + 1] = r.y, out[4 * i + 2] = r.z, out[4 * i + 3] = r.w;"""
    result, _ = evaluate(source, np.float32([0]), count=24, threads=6)
    assert result.reshape(6, 4).tolist() == [
        [1, 1, 3, 2], [7, 7, 7, 7], [1.5, 1.5, 3.5, 2.5], [1, 2, 5, 6], [3, 4, 2, 3], [1, 2, 0, 0],
    ]  # fmt: skip


def test_vector_functions():
    source = """
      float4 x = float4(a[0], a[1], a[2], a[3]), y = float4(2.0f);
      float values[] = {
          metal::dot(x, y), metal::length(x), metal::max(x, y).w, metal::min(x, 2.0f).x,
          metal::clamp(x, 0.0f, 2.0f).z, metal::abs(-x).y, metal::exp2(x).z, metal::fma(x, x, y).y,
          float(metal::any(x > y)), float(metal::all(x > y)), metal::select(x, y, x > y).w,
          metal::select(1.0f, 2.0f, true), metal::cross(x.xyz, y.xyz).x, metal::normalize(x).y,
      };
      for (int n = 0; n < 14; n++) out[n] = values[n];"""
    x = np.float32([1, 2, 3, 4])
    result, report = evaluate(source, x, count=14, threads=1)
    length = math.sqrt(30)
    expected = [20, length, 4, 1, 2, 2, 8, 6, 1, 0, 2, 2, -2, 2 / length]
    assert np.allclose(result, expected, rtol=1e-6)


def test_vectors_in_memory():
    """Through device and threadgroup memory, as vectors and component by component."""
    source = """
      threadgroup float4 tile[8];
      tile[i] = ((const device float4*)a)[i];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float4 mine = tile[7 - i];
      mine.yz += tile[i].yz;
      ((device float4*)out)[i] = mine;"""
    a = np.arange(32, dtype=np.float32)
    header = "#include <metal_stdlib>\nusing namespace metal;\n"
    result, report = evaluate(source, a, count=32, threads=8, header=header)
    rows = a.reshape(8, 4)
    expected = rows[::-1].copy()
    expected[:, 1:3] += rows[:, 1:3]
    assert np.array_equal(result.reshape(8, 4), expected)
    assert report.device_read["a"] == report.device_written["out"] == 128


def test_structs_cross_address_spaces():
    """Whole, by assignment and by initialisation, and through a cast as MLX's loaders do."""
    header = """
      struct State { float sum, greatest; };
      struct alignas(16) Pack { uchar bytes[16]; };"""
    source = """
      threadgroup State states[8];
      threadgroup float4 rows[8];
      State mine = {a[4 * i], 2.0f};
      states[i] = mine;
      *((threadgroup Pack*)&rows[i]) = *((const device Pack*)&a[4 * i]);
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      State other = states[7 - i];
      other.sum += rows[7 - i].y;
      out[i] = other.sum * other.greatest;"""
    a = np.arange(32, dtype=np.float32)
    result, report = evaluate(source, a, count=8, header=header)
    assert np.array_equal(result, 2 * (a[::4] + a[1::4])[::-1])
    assert report.device_read["a"] == 8 * (4 + 16)
    assert report.threadgroup_written == 8 * (8 + 16)
