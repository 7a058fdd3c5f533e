"""Races planted into small right kernels are each found, whatever the order of the threads."""

from dataclasses import replace

import numpy as np
import pytest

from metal_host.proof.planted import BARRIER, SEEDS, Example, barrier_removed, kernel, numbers

_X = numbers(2, 128)
TREE = Example(
    kernel("""
    threadgroup float part[128];
    part[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = 64; n > 0; n /= 2) {
      if (t < n) part[t] += part[t + n];
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (t == 0) y[g] = part[0];"""),
    _X,
    _X.sum(1),
    threads=128,
    threadgroups=2,
)
TILES = Example(  # the next tile is fetched while this one is turned round
    kernel("""
    threadgroup float tile[2][64];
    tile[0][t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint k = 0; k < 4; ++k) {
      if (k < 3) tile[(k + 1) % 2][t] = x[64 * (k + 1) + t];
      y[64 * k + t] = tile[k % 2][63 - t];
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }"""),
    _X.reshape(4, 64),
    _X.reshape(4, 64)[:, ::-1].copy(),
)
SCAN = Example(
    kernel("""
    threadgroup float sums[128];
    sums[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint n = 1; n < 128; n *= 2) {
      float before = t >= n ? sums[t - n] : 0;
      threadgroup_barrier(mem_flags::mem_threadgroup);
      sums[t] += before;
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    y[i] = sums[t];"""),
    _X,
    _X.cumsum(1),
    threads=128,
    threadgroups=2,
)
WITH_BARRIERS = {"tree": TREE, "tiles": TILES, "scan": SCAN}
#: so that a thread that comes too early finds values, not memory that nobody has written
CLEARED = {
    "tree": ("part[128];", "part[128];  part[t] = 0;"),
    "tiles": ("tile[2][64];", "tile[2][64];  tile[0][t] = tile[1][t] = 0;"),
    "scan": ("sums[128];", "sums[128];  sums[t] = 0;"),
}
OTHER_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_none);"
#: kernel, number of the barrier, what a thread does, whether it may come before any writing
BARRIERS = [
    ("tree", 0, "part[t] += part[t + n]", True),
    ("tree", 1, "part[t] += part[t + n]", False),
    ("tiles", 0, "tile[k % 2][63 - t]", True),
    ("tiles", 1, "tile[", True),
    ("scan", 0, "sums[", True),
    ("scan", 1, "sums[", False),
    ("scan", 2, "sums[", False),
]


@pytest.mark.parametrize("name", WITH_BARRIERS)
def test_right_kernels(name):
    WITH_BARRIERS[name].is_right()


def test_every_barrier_is_in_the_list():
    listed = [(name, which) for name, which, *_ in BARRIERS]
    found = [(n, i) for n, e in WITH_BARRIERS.items() for i in range(e.text.count(BARRIER))]
    assert listed == found


@pytest.mark.parametrize("cleared", [False, True], ids=["", "cleared"])
@pytest.mark.parametrize(("name", "which", "at", "early"), BARRIERS)
def test_each_barrier_removed(name, which, at, early, cleared):
    text = barrier_removed(WITH_BARRIERS[name].text, which)
    broken = replace(WITH_BARRIERS[name], text=text)
    changes = []
    if cleared:
        declared, with_zeros = CLEARED[name]
        changes = [(declared, f"{with_zeros} {OTHER_BARRIER}")]
    for seed in SEEDS:
        kind = "race or uninitialised read" if early and not cleared else "race"
        found = broken.fault(*changes, seed=seed, kind=kind, at=at)
        assert "threadgroup array" in str(found)
        assert found.threadgroup < (broken.threadgroups, 0, 0)
        if found.kind == "race":
            assert found.thread != found.other_thread
            assert found.threadgroup == found.other_threadgroup


def test_a_missing_barrier_goes_unseen_without_the_detector():
    """Even the right results of some orders prove nothing: the mutation check of this file."""
    broken = replace(TREE, text=barrier_removed(TREE.text, 0))
    right = broken.results_unwatched()
    assert not all(right)
    turned = replace(TILES, text=barrier_removed(TILES.text, 0))
    assert not all(turned.results_unwatched())


# Races on threadgroup memory

SHARED = Example(
    kernel("""
    threadgroup float shared[64];
    shared[63 - t] = 0;  // so that nothing is unwritten below
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_none);
    shared[t] = x[t];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = shared[t ^ 32];"""),
    _X[0, :64],
    np.roll(_X[0, :64], 32),
)
THREADGROUP_RACES = {
    "two threads write": (("shared[t] = x[t]", "shared[t & 62] = x[t]"), "shared[t & 62] ="),
    "one reads what another writes": (
        ("shared[t ^ 32]", "shared[t ^ 32] + (shared[t] = 1)"),
        "y[t]",
    ),
    "a barrier of one simdgroup": (
        (BARRIER, "simdgroup_barrier(mem_flags::mem_threadgroup);"),
        "y[t]",
    ),
    "a barrier for device memory": (
        (BARRIER, "threadgroup_barrier(mem_flags::mem_device);"),
        "y[t]",
    ),
    "a barrier for no memory": ((BARRIER, "threadgroup_barrier(mem_flags::mem_none);"), "y[t]"),
    "a simdgroup operation": ((BARRIER, "simd_sum(1.0f);"), "y[t]"),
}


def test_sharing_is_right():
    SHARED.is_right()


@pytest.mark.parametrize("name", THREADGROUP_RACES)
def test_races_on_threadgroup_memory(name):
    change, at = THREADGROUP_RACES[name]
    for seed in SEEDS:
        race = SHARED.fault(change, seed=seed, kind="race", at=at)
        assert race.thread != race.other_thread
        if change[0] == BARRIER:
            assert race.thread ^ race.other_thread == 32


def test_an_order_that_hides_a_race():
    """Where one simdgroup happens to run before the other, the results are right."""
    changes = [(BARRIER, ""), ("= shared[t ^ 32]", "= t == 32 ? shared[t ^ 32] : x[t ^ 32]")]
    right = SHARED.results_unwatched(*changes)
    assert any(right) and not all(right)
    for seed in SEEDS:
        race = SHARED.fault(*changes, seed=seed, kind="race", at="shared[t")
        assert {race.thread, race.other_thread} == {0, 32}


# Races on device memory

THROUGH_DEVICE = Example(
    kernel("""
    device float* mine = y + 64 * g;
    mine[t] = x[i];
    threadgroup_barrier(mem_flags::mem_device);
    float other = mine[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    mine[t] = other;"""),
    _X[:, :64],
    _X[:, 63::-1].copy(),
    threadgroups=2,
    initial=np.zeros((2, 64), np.float32),
)
_FIRST, _SECOND = (
    f"threadgroup_barrier(mem_flags::mem_device);\n    {after}" for after in ("float", "mine")
)
DEVICE_RACES = {
    "no barrier before reading": ((_FIRST, "float"), "mine[63 - t]", True),
    "no barrier after reading": ((_SECOND, "mine"), "mine[t] = other", True),
    "a barrier for other memory": ((_FIRST, f"{BARRIER} float"), "mine[63 - t]", True),
    "two threads write": (("mine[t] = x[i]", "mine[t / 2] = x[i]"), "mine[t / 2]", True),
    "two threadgroups write": (("y + 64 * g", "y"), "mine", False),
}


def test_through_device_memory_is_right():
    THROUGH_DEVICE.is_right()


@pytest.mark.parametrize("name", DEVICE_RACES)
def test_races_on_device_memory(name):
    change, at, inside = DEVICE_RACES[name]
    for seed in SEEDS:
        race = THROUGH_DEVICE.fault(change, seed=seed, kind="race", at=at)
        assert "device buffer `y`" in str(race)
        assert (race.threadgroup == race.other_threadgroup) == inside


IN_PLACE = Example(  # y holds values already; each threadgroup doubles its own
    kernel("    y[i] = 2 * y[i];"),
    _X[0, :4],
    2 * _X,
    threadgroups=4,
    initial=_X,
)


def test_a_threadgroup_reads_what_another_writes():
    IN_PLACE.is_right()
    for seed in SEEDS:
        race = IN_PLACE.fault(
            ("2 * y[i]", "2 * y[(i + 64) % 256]"), seed=seed, kind="race", at="y[i]"
        )
        assert race.threadgroup != race.other_threadgroup
        assert "device buffer `y`" in str(race)
    assert not all(IN_PLACE.results_unwatched(("2 * y[i]", "2 * y[(i + 64) % 256]")))


def test_a_barrier_does_not_order_threadgroups():
    both = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
    change = ("y[i] = 2 * y[i];", f"float v = y[(i + 64) % 256]; {both} y[i] = 2 * v;")
    race = IN_PLACE.fault(change, kind="race", at="y[")
    assert race.threadgroup != race.other_threadgroup
