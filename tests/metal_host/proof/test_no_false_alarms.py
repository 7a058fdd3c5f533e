"""What is no race, in kernels that come close to one, raises no alarm."""

import mlx.core as mx
import numpy as np
import pytest

import metal_host
from metal_host.proof.planted import ORDERS, Example, kernel, numbers

_X = numbers(64)
_BYTES = (np.arange(64, dtype=np.uint8) * 3).astype(np.float32)


def _through(type_: str, factor: int) -> Example:
    """Each thread writes one element of a word that others write too."""
    body = f"""
    threadgroup {type_} parts[64];
    parts[t] = {type_}(x[t] * {factor});
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = parts[63 - t];"""
    return Example(kernel(body), _BYTES, factor * _BYTES[::-1].copy())


QUIET = {
    "bytes of one word": _through("uchar", 1),
    "halves of one word": _through("ushort", 300),
    "halves of floating point": _through("half", 1),
    "halves of one word of device memory": Example(
        kernel("    ((device half*)y)[t] = half(x[t]);"),
        _BYTES,
        _BYTES.astype(np.float16).view(np.float32),
    ),
    "all read": Example(
        kernel("""
    threadgroup float one[1];
    if (t == 0) one[0] = x[0];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = one[0] + x[1];"""),
        _X,
        np.full(256, _X[0] + _X[1], np.float32),
        threadgroups=4,
    ),
    "ordered inside a simdgroup": Example(
        kernel("""
    threadgroup float turn[64];
    for (uint n = 0; n < 3; ++n) {
      turn[t] = x[t] + n;
      simdgroup_barrier(mem_flags::mem_threadgroup);
      y[t] = turn[t ^ 31];
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }"""),
        _X,
        _X.reshape(2, 32)[:, ::-1].reshape(64) + 2,
    ),
    "through device memory inside a simdgroup": Example(
        kernel("""
    y[t] = x[t];
    simdgroup_barrier(mem_flags::mem_device);
    float v = y[t ^ 31];
    simdgroup_barrier(mem_flags::mem_device);
    y[t] = v;"""),
        _X,
        _X.reshape(2, 32)[:, ::-1].reshape(64).copy(),
    ),
    "the same element again and again": Example(
        kernel("""
    threadgroup float own[64];
    own[t] = 0;
    for (uint n = 0; n < 4; ++n) own[t] += x[t];
    y[t] = own[t];"""),
        _X,
        4 * _X,
    ),
    "one component of a vector by another thread": Example(
        kernel("""
    threadgroup float4 whole[16];
    ((threadgroup float*)whole)[t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t < 16) { float4 v = whole[t]; for (uint n = 0; n < 4; ++n) y[4 * t + n] = v[n]; }"""),
        _X,
        _X,
    ),
    "the first thread to come": Example(
        kernel("""
    threadgroup atomic_uint places;
    if (t == 0) atomic_store_explicit(&places, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&places, 1, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = atomic_load_explicit(&places, memory_order_relaxed);"""),
        _X,
        np.full(64, 64, np.float32),
    ),
}


@pytest.mark.parametrize("name", QUIET)
def test_no_alarm(name):
    QUIET[name].is_right()


# Atomics

ATOMICS = Example(
    kernel("""
    device atomic_uint* count = (device atomic_uint*)y;
    atomic_fetch_add_explicit(count, 1, memory_order_relaxed);
    atomic_fetch_max_explicit(count + 1, i, memory_order_relaxed);"""),
    _X,
    np.array([256, 255], np.uint32).view(np.float32),
    threadgroups=4,
    initial=np.zeros(2, np.float32),
)


def test_atomics_are_no_race():
    for seed in ORDERS:
        y, _ = ATOMICS.launch(seed=seed)
        assert y.tobytes() == ATOMICS.y.tobytes()


def test_a_plain_access_beside_atomics_is_one():
    counted = "atomic_fetch_add_explicit(count, 1, memory_order_relaxed)"
    for plain, at in (("*(device uint*)y += 1", "+= 1"), ("y[2 + i] = y[0]", "y[0]")):
        change = (counted, f"{counted}; if (t == 7) {plain}")
        larger = Example(ATOMICS.text, _X, _X, threadgroups=4, initial=np.zeros(300, np.float32))
        found = larger.fault(change, kind="race")
        assert at in found.where + found.other_where


# One launch after the other


def test_the_next_launch_may_read():
    """Each element is written by one threadgroup, then read by others, of the next launch."""
    turned = mx.fast.metal_kernel(
        name="turned",
        input_names=["a"],
        output_names=["out"],
        source="uint i = thread_position_in_grid.x; out[i] = a[threads_per_grid.x - 1 - i] + 1;",
    )

    def once(a):
        given = {"output_shapes": [a.shape], "output_dtypes": [a.dtype], "grid": (128, 1, 1)}
        return turned(inputs=[a], threadgroup=(32, 1, 1), **given)[0]

    a = mx.random.normal((128,))
    for seed in ORDERS:
        out, report = metal_host.run(lambda a: once(once(a)), a, seed=seed)
        assert len(report.launches) == 2
        assert mx.allclose(out, a + 2)
