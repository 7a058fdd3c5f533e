"""MLX's gated delta rule from its wheel (a scan over time) agrees with MLX on the processor."""

import mlx.core as mx
import numpy as np
import pytest

from metal_host import Fault
from metal_host.proof.mlx_kernels import TYPES, assert_near, launch, packed, random, text
from metal_host.proof.numbers import float64
from metal_host.proof.versions import seen_in

SOURCE = text("gated_delta_update.h")
B, HK, HV, DK, DV = 2, 1, 2, 64, 8
CHUNK = 8


def inputs(T: int, dtype: mx.Dtype) -> list[mx.array]:
    """q, k, v, state, gamma, beta, in the order of the kernels' buffers."""
    q, k = (random((B, T, HK, DK), dtype, n) / DK**0.5 for n in range(2))
    v, state = random((B, T, HV, DV), dtype, 2), random((B, HV, DV, DK), mx.float32, 3)
    gamma = mx.random.uniform(0.7, 1, (B, T, HV), key=mx.random.key(4)).astype(dtype)
    return [q, k, v, state, gamma, mx.sigmoid(random((B, T, HV), dtype, 5))]


def truth(q, k, v, state, gamma, beta) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, state, gamma, beta = map(float64, (q, k, v, state, gamma, beta))
    q, k = (x.repeat(HV // HK, 2) for x in (q, k))
    steps = []
    for t in range(q.shape[1]):
        state = state * gamma[:, t, :, None, None]
        delta = (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + np.einsum("bhv,bhk->bhvk", delta, k[:, t])
        steps.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return np.stack(steps, 1), state


def run(kernel: str, T: int, dtype: mx.Dtype, seed: int = 0, keep: bool = False):
    """The outputs checked, and the report. `keep`: the states before every third step too."""
    given = inputs(T, dtype)
    y, state = (given[2].shape, dtype), (given[3].shape, mx.float32)
    states = ((B, HV, -(-T // 3), DV, DK), mx.float32)
    last = CHUNK if "chunk" in kernel else 3
    expression = f"{kernel}<{TYPES[dtype]}, {DK}, {DV}, {HK}, {HV}, {last}>"
    buffers = [*given, y, state, packed("i", T), states if keep else None]
    groups, threads = (
        ((1, 1, B * HV), (32, 1, 1)) if "chunk" in kernel else ((1, 2, B * HV), (32, 4, 1))
    )
    outputs, report = launch(SOURCE, expression, buffers, groups, threads, seed, {200: keep})
    by_mlx = mx.fast.gated_delta_update(*given[:3], *given[4:], given[3])
    for out, own, true in zip(outputs, by_mlx, truth(*given), strict=False):
        assert_near(out, own.astype(out.dtype), true)
    if keep:
        assert mx.array_equal(outputs[2][:, :, 0], given[3])
        later = truth(*(a if a is given[3] else a[:, :3] for a in given))[1]
        assert np.allclose(outputs[2][:, :, 1], later, rtol=1e-4, atol=1e-5)
    return report


@pytest.mark.parametrize(("T", "dtype", "keep"), [(7, mx.float32, True), (4, mx.bfloat16, False)])
def test_step_by_step(T, dtype, keep):
    reports = [run("gated_delta_seq", T, dtype, seed, keep) for seed in range(3)]
    assert all(report == reports[0] for report in reports)
    # A product for what is remembered, one for what is added and one for the output.
    assert reports[0].multiply_accumulates == 3 * T * B * HV * DV * DK


@pytest.mark.parametrize(("T", "dtype"), [(CHUNK, mx.float32), (5, mx.float16)])
def test_a_chunk(T, dtype):
    reports = [run("gated_delta_fused_chunk", T, dtype, seed) for seed in range(3)]
    assert all(report == reports[0] for report in reports)


@seen_in("mlx", "0.32.4")
def test_chunks_that_share_memory_without_a_barrier():
    """The next chunk's decay is written where lanes may still read this one's.

    Lanes of a simdgroup that run in step never show it; Metal asks for a simdgroup_barrier.
    """
    with pytest.raises(Fault, match="threadgroup array `gamma_all`") as caught:
        run("gated_delta_fused_chunk", 2 * CHUNK, mx.float32)
    assert caught.value.kind == "race"
    assert "gamma[thread_index_in_simdgroup] = gamma_val" in str(
        caught.value
    ) or "PROCESS_CHUNK_SG" in str(caught.value)
