"""Threads that do not meet, planted into a right kernel: divergent barriers, deadlocks."""

import pytest

from metal_host import Fault
from metal_host.proof.planted import SEEDS, Example, kernel, numbers

_X = numbers(2, 96)
MEETING = Example(  # every thread gets the sum of its threadgroup's values
    kernel("""
    threadgroup float sums[3];
    threadgroup_barrier(mem_flags::mem_none);  // what is planted here has no other consequence
    simdgroup_barrier(mem_flags::mem_none);
    float sum = simd_sum(x[i]);
    if (lane == 0) sums[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float all = sums[0] + sums[1] + sums[2];
    y[i] = all;"""),
    _X,
    _X.sum(1, keepdims=True).repeat(96, 1),
    threads=96,
    threadgroups=2,
)
_BARRIER = "threadgroup_barrier(mem_flags::mem_none);"
_SIMDGROUP = "simdgroup_barrier(mem_flags::mem_none);"
_SUM = "float sum = simd_sum(x[i]);"
BARRIER, OPERATION = "divergent barrier", "divergent simdgroup operation"
#: name -> change, kind, whether the two threads are of one simdgroup (None: either)
DIVERGENCES = {
    "half the threads": ((_BARRIER, f"if (t % 2) {_BARRIER}"), BARRIER, None),
    "one simdgroup": ((_BARRIER, f"if (simd == 1) {_BARRIER}"), BARRIER, None),
    "all but one thread": ((_BARRIER, f"if (t != 50) {_BARRIER}"), BARRIER, None),
    "an early return": ((_BARRIER, f"if (t == 95) return;\n    {_BARRIER}"), BARRIER, None),
    "a return after it": ((_BARRIER, f"if (t < 95) {_BARRIER} else return;"), BARRIER, None),
    "a different barrier": (
        (_BARRIER, f"if (simd == 1) {{\n{_BARRIER}\n}} else {{\n{_BARRIER}\n}}"),
        BARRIER,
        False,
    ),
    "a different barrier inside a simdgroup": (
        (_BARRIER, f"if (lane < 5) {{\n{_BARRIER}\n}} else {{\n{_BARRIER}\n}}"),
        BARRIER,
        None,
    ),
    "other times round a loop": (
        (_BARRIER, f"for (uint n = 0; n <= t / 95; ++n) {_BARRIER}"),
        BARRIER,
        None,
    ),
    "half a simdgroup": (
        (_SUM, "float sum = 0; if (lane < 16) sum = simd_sum(x[i]);"),
        OPERATION,
        True,
    ),
    "different operations": (
        (_SUM, "float sum = lane < 16 ? simd_sum(x[i]) : simd_max(x[i]);"),
        OPERATION,
        True,
    ),
    "other operations before it": (
        (_SUM, f"if (lane == 3) simd_sum(1.0f);\n    {_SUM}"),
        OPERATION,
        True,
    ),
    "at a barrier instead": (
        (_SUM, f"float sum = 0; if (t < 16) {_BARRIER} else sum = simd_sum(x[i]);"),
        f"{OPERATION} or {BARRIER}",
        None,
    ),
    "a simdgroup's barrier": ((_SIMDGROUP, f"if (lane % 2) {_SIMDGROUP}"), OPERATION, True),
}


def test_the_right_kernel():
    MEETING.is_right()


@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergence(name):
    change, kind, one_simdgroup = DIVERGENCES[name]
    for seed in SEEDS:
        found = MEETING.fault(change, seed=seed, kind=kind)
        assert found.thread != found.other_thread
        assert found.threadgroup == found.other_threadgroup
        if one_simdgroup is not None:
            assert (found.thread // 32 == found.other_thread // 32) == one_simdgroup


@pytest.mark.parametrize("name", ["half the threads", "an early return", "different operations"])
def test_divergence_is_found_without_tracing(name):
    change, kind, _ = DIVERGENCES[name]
    with pytest.raises(Fault) as caught:
        MEETING.launch(change, trace=False)
    assert caught.value.kind == kind


# A thread that waits for what does not come

WAITING = Example(  # the last thread to come takes the sum
    kernel("""
    threadgroup atomic_uint arrived;
    threadgroup float all[32];
    if (t == 0) atomic_store_explicit(&arrived, 0, memory_order_relaxed);
    all[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_add_explicit(&arrived, 1, memory_order_relaxed);
    while (atomic_load_explicit(&arrived, memory_order_relaxed) < 8) {}
    y[i] = all[t ^ 1];"""),
    _X[0, :8],
    _X[0, :8].reshape(4, 2)[:, ::-1].reshape(8),
    threads=8,
)
DEADLOCKS = {
    "for one thread too many": ("< 8) {}", "< 9) {}"),
    "for a thread that has returned": (
        "atomic_fetch_add",
        "if (t == 3) return;\n    atomic_fetch_add",
    ),
    "for a thread at a barrier": (
        "atomic_fetch_add",
        "if (t == 3) threadgroup_barrier(mem_flags::mem_none);\n    atomic_fetch_add",
    ),
}


def test_waiting_for_threads_that_come_is_right():
    WAITING.is_right()


@pytest.mark.parametrize("name", DEADLOCKS)
def test_deadlock(name):
    found = WAITING.fault(DEADLOCKS[name], kind="deadlock", at="while (atomic_load")
    assert found.threadgroup == (0, 0, 0)


def test_waiting_for_plain_memory():
    """Which another thread never changes; where one does, that is a race."""
    waiting = "atomic_load_explicit(&arrived, memory_order_relaxed) < 8"
    never = WAITING.fault((waiting, "t == 5 && all[t] == x[i]"), kind="deadlock", at="all[t] == x")
    assert never.thread == 5
    late = ("y[i] = all[t ^ 1];", "if (t == 7) all[0] = 3; y[i] = 0;")
    changes = [(waiting, "t == 0 && all[0] == x[0]"), late]
    for seed in range(3):
        WAITING.fault(*changes, seed=seed, kind="race", at="all[0]")
