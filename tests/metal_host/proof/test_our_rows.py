"""RMS norm and rotary embedding, written here, agree with mx.fast's on the processor.

For what MLX ships only inside its compiled library; the texts are our own.
"""

import mlx.core as mx
import numpy as np
import pytest

import metal_host
from metal_host.proof.mlx_kernels import FLOATS, assert_near, random
from metal_host.proof.numbers import float64

RMS_NORM = mx.fast.metal_kernel(
    name="our_rms_norm",
    input_names=["x", "weight", "eps"],
    output_names=["out"],
    source="""
  threadgroup float sums[32];
  uint t = thread_position_in_threadgroup.x, lane = thread_index_in_simdgroup;
  uint row = threadgroup_position_in_grid.x, simd = simdgroup_index_in_threadgroup;
  float sum = 0;
  for (uint d = t; d < D; d += THREADS) {
    float v = float(x[row * D + d]);
    sum += v * v;
  }
  sum = simd_sum(sum);
  if (lane == 0) sums[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sum = simd_sum(lane < THREADS / 32 ? sums[lane] : 0.0f);
  float scale = metal::precise::rsqrt(sum / D + eps);
  for (uint d = t; d < D; d += THREADS)
    out[row * D + d] = weight[d] * T(float(x[row * D + d]) * scale);
""",
)
ROPE = mx.fast.metal_kernel(
    name="our_rope",
    input_names=["x", "offset", "log2_base"],
    output_names=["out"],
    source="""
  uint pair = thread_position_in_grid.x, row = thread_position_in_grid.y;
  uint head = row * D, position = offset + row % LENGTH;
  uint first = TRADITIONAL ? 2 * pair : pair;
  uint second = TRADITIONAL ? 2 * pair + 1 : pair + D / 2;
  float theta = position * metal::exp2(-float(pair) / (D / 2) * log2_base);
  float c = metal::cos(theta), s = metal::sin(theta);
  float a = float(x[head + first]), b = float(x[head + second]);
  out[head + first] = T(a * c - b * s);
  out[head + second] = T(a * s + b * c);
""",
)


@pytest.mark.parametrize("D", [32, 500])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rms_norm(dtype, D):
    x, weight, threads = random((6, D), dtype), random((D,), dtype, 1), 128
    reports = []

    def call(x, weight):
        return RMS_NORM(
            inputs=[x, weight, mx.array(1e-5)],
            output_shapes=[x.shape],
            output_dtypes=[dtype],
            grid=(6 * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            template=[("T", dtype), ("D", D), ("THREADS", threads)],
        )[0]

    for seed in range(4):
        out, report = metal_host.run(call, x, weight, seed=seed)
        reports.append(report)
        truth = float64(x) / np.sqrt((float64(x) ** 2).mean(-1, keepdims=True) + 1e-5)
        assert_near(out, mx.fast.rms_norm(x, weight, 1e-5), truth * float64(weight))
    assert all(one == reports[0] for one in reports)
    one = reports[0]
    assert (one.barriers, one.multiply_accumulates) == (6, 6 * D)
    assert one.special_functions == 6 * threads
    assert one.device_read["x"] == 2 * 6 * D * dtype.size
    assert one.threadgroup_written == 6 * threads // 32 * 4


@pytest.mark.parametrize("traditional", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rope(dtype, traditional):
    D, length = 48, 5
    x = random((2, 3, length, D), dtype)

    def call(x, offset):
        return ROPE(
            inputs=[x, offset, mx.array(float(np.log2(1e4)))],
            output_shapes=[x.shape],
            output_dtypes=[dtype],
            grid=(D // 2, 6 * length, 1),
            threadgroup=(8, 3, 1),
            template=[("T", dtype), ("D", D), ("LENGTH", length), ("TRADITIONAL", traditional)],
        )[0]

    out, report = metal_host.run(call, x, mx.array(100, mx.uint32))
    own = mx.fast.rope(x, D, traditional=traditional, base=1e4, scale=1, offset=100)
    angles = (100 + np.arange(length))[:, None] * 1e4 ** -(np.arange(D // 2) / (D // 2))
    z = float64(x)
    a, b = (z[..., ::2], z[..., 1::2]) if traditional else (z[..., : D // 2], z[..., D // 2 :])
    turned = [a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)]
    truth = np.stack(turned, -1).reshape(z.shape) if traditional else np.concatenate(turned, -1)
    assert_near(out, own, truth)
    assert report.device_read["x"] == report.device_written["out"] == x.size * dtype.size
