"""Accesses out of bounds, of unwritten memory and at crooked addresses, planted, are each found."""

import numpy as np
import pytest

from metal_host import Library, Output
from metal_host.proof.planted import SEEDS, Example, kernel, numbers

_X = numbers(128)
COPY = Example(
    kernel("""
    threadgroup float before[64];
    threadgroup float after[64];
    before[t] = x[i];
    after[t] = -x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = before[63 - t] - after[63 - t];"""),
    _X,
    2 * _X.reshape(2, 64)[:, ::-1].reshape(128),
    threadgroups=2,
)
_READ, _WRITTEN, _SHARED = "before[t] = x[i]", "y[i] =", "before[63 - t]"
#: name -> change, the memory that the report names, byte there, thread and threadgroup
BOUNDS = {
    "one before an input": ((_READ, "before[t] = x[int(i) - 1]"), "device buffer `x`", -4, 0, 0),
    "one past an input": ((_READ, "before[t] = x[i + 1]"), "device buffer `x`", 512, 63, 1),
    "far past an input": ((_READ, "before[t] = x[i + (i == 9) * 9999]"), "buffer", None, 9, 0),
    "farther": ((_READ, "before[t] = x[i + (i == 9) * (1ul << 40)]"), "buffer", None, 9, 0),
    "a negative index": (
        (_READ, "before[t] = x[i == 9 ? -7 : int(i)]"),
        "device buffer `x`",
        -28,
        9,
        0,
    ),
    "half past an input": (
        (_READ, "struct Two { float a, b; } two = *(device const Two*)(x + i); before[t] = two.a"),
        "device buffer `x`",
        508,
        63,
        1,
    ),
    "one before an output": ((_WRITTEN, "y[int(i) - 1] ="), "device buffer `y`", -4, 0, 0),
    "one past an output": ((_WRITTEN, "y[i + 1] ="), "device buffer `y`", 512, 63, 1),
    "far past an output": ((_WRITTEN, "y[i + (i == 9) * 9999] ="), "buffer", None, 9, 0),
    "one before a threadgroup array": (
        (_SHARED, "before[63 - int(t) - 1]"),
        "threadgroup array `before`",
        -4,
        63,
        None,
    ),
    "one past a threadgroup array": (
        (_SHARED, "before[64 - t]"),
        "threadgroup array `before`",
        256,
        0,
        None,
    ),
    "written past a threadgroup array": (
        ("before[t] = x[i]", "before[t + 1] = x[i]"),
        "threadgroup array `before`",
        256,
        63,
        None,
    ),
    "far past a threadgroup array": (
        (_SHARED, "before[63 - t + (t == 5) * 500]"),
        "threadgroup array",
        None,
        5,
        None,
    ),
}


def test_the_right_kernel():
    COPY.is_right()


@pytest.mark.parametrize("name", BOUNDS)
def test_out_of_bounds(name):
    change, memory, byte, thread, threadgroup = BOUNDS[name]
    for seed in SEEDS:
        found = COPY.fault(change, seed=seed, kind="out of bounds", at=change[1])
        place = memory if byte is None else f"byte {byte} of the {memory}"
        assert place in str(found), found
        assert found.thread == thread, found
        assert threadgroup is None or found.threadgroup == (threadgroup, 0, 0), found


def test_out_of_bounds_goes_unseen_without_the_detector():
    """Nothing crashes, and here the results are even right: one read too many, of no use."""
    useless = (_READ, "before[t] = x[i] + 0 * (x[i + 1] == x[i + 1])")
    assert all(COPY.results_unwatched(useless))
    COPY.fault(useless, kind="out of bounds")
    beside = (_WRITTEN, "after[64 + t] = 0; y[i] =")
    assert all(COPY.results_unwatched(beside))
    COPY.fault(beside, kind="out of bounds", at="after[64 + t]")


# Unwritten memory

HALF = Example(  # the second half of `all` stays unwritten, and unread
    kernel("""
    threadgroup float all[128];
    float own[2];
    own[0] = x[i];
    own[1] = -x[i];
    all[t] = own[0] + own[1] + x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = all[63 - t];
    threadgroup_barrier(mem_flags::mem_device);
    y[i] = y[64 * g + 63 - (63 - t)];"""),
    _X,
    _X.reshape(2, 64)[:, ::-1].reshape(128).copy(),
    threadgroups=2,
)
UNWRITTEN = {
    "threadgroup memory": (
        ("all[63 - t]", "all[64 - t]"),
        "byte 256 of the threadgroup array `all`",
    ),
    "left by another threadgroup": (
        ("all[t] = own", "if (g == 0 || t != 3) all[t] = own"),
        "byte 12 of the threadgroup array `all`",
    ),
    "an output": (
        ("y[i] = all[63 - t]", "if (i != 70) y[i] = all[63 - t]"),
        "byte 280 of the device buffer `y`",
    ),
    "half of an element": (
        ("all[t] = own[0] + own[1] + x[i]", "((threadgroup half*)all)[2 * t] = 0"),
        "of the threadgroup array `all` (4 bytes)",
    ),
}


def test_the_kernel_that_writes_half():
    HALF.is_right()


@pytest.mark.parametrize("name", UNWRITTEN)
def test_unwritten_memory(name):
    change, place = UNWRITTEN[name]
    for seed in SEEDS:
        found = HALF.fault(change, seed=seed, kind="uninitialised read")
        assert place in str(found), found


def test_unwritten_memory_is_poison_without_the_detector():
    """The stand-in for luck: a GPU often finds zeros there, or the last launch's right values."""
    y, _ = HALF.launch(UNWRITTEN["threadgroup memory"][0], trace=False)
    assert np.isnan(y).sum() == 2
    y, _ = HALF.launch(("own[1] = -x[i];", ""), trace=False)
    assert np.isnan(y).all()


def test_unwritten_private_memory_is_poison():
    """It is not traced: it holds NaN, at every level of optimisation."""
    for optimise in (0, 1, 2):
        y, _ = HALF.launch(("own[1] = -x[i];", ""), optimise=optimise)
        assert np.isnan(y).all(), optimise


def test_an_output_that_is_never_written_is_told():
    y, report = HALF.launch(
        ("y[i] = all[63 - t];", "if (i < 100) y[i] = all[63 - t];"),
        ("y[i] = y[64 * g + 63 - (63 - t)];", ""),
    )
    assert report.unwritten["y"] == 28 * 4
    assert np.isnan(y[100:]).all() or (y[100:] == 0).all()


# Alignment

WIDE = Example(
    kernel("""
    threadgroup alignas(16) half all[512];
    *(threadgroup uint4*)(all + 8 * t) = uint4(as_type<uint>(x[i]));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float4 four = *(device const float4*)(x + (i & ~3u));
    y[i] = as_type<float>(*(threadgroup uint*)(all + 8 * (63 - t))) + four.x;"""),
    _X,
    _X.reshape(2, 64)[:, ::-1].reshape(128) + _X.reshape(32, 4)[:, 0].repeat(4),
    threadgroups=2,
)
MISALIGNED = {
    "a vector of a device buffer": (("x + (i & ~3u)", "x + 1 + (i & 63)"), "buffer `x`", 16),
    "a component": (
        ("*(device const float4*)(x + (i & ~3u))", "((device const float4*)(x + 1))[t / 4].y"),
        "buffer `x`",
        16,
    ),
    "a vector of a threadgroup array": (("all + 8 * t)", "all + 1 + 7 * t)"), "array `all`", 16),
    "an array of halves": (("alignas(16) ", ""), "array `all`", 16),
    "a number": (("all + 8 * (63", "all + 1 + 2 * (63"), "array `all`", 4),
}


def test_the_kernel_of_wide_accesses():
    WIDE.is_right()


@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned_accesses(name):
    change, memory, multiple = MISALIGNED[name]
    for seed in SEEDS:
        found = WIDE.fault(change, seed=seed, kind="misaligned access")
        assert f"{memory}, whose address is no multiple of {multiple}" in str(found)


@pytest.mark.parametrize("name", MISALIGNED)
def test_misaligned_accesses_crash_nothing_without_the_detector(name):
    for optimise in (0, 2):
        WIDE.launch(MISALIGNED[name][0], trace=False, optimise=optimise)


# Size


def test_more_threadgroup_memory_than_there_is():
    most = ("all[128]", "all[8192]")
    _, report = HALF.launch(most)
    assert report.threadgroup_memory == 32768
    found = HALF.fault(("all[128]", "all[8193]"), kind="threadgroup memory")
    assert "32772 bytes of 32768 (all 32772)" in str(found)
    more = (
        "threadgroup float all[128];",
        "threadgroup float all[8192]; threadgroup uchar one[1]; one[0] = 0;",
    )
    assert "32769" in str(HALF.fault(more, kind="threadgroup memory"))


def test_more_threads_than_there_are():
    with pytest.raises(ValueError, match="1024"):
        Library(COPY.text, {"it": "example"}).launch(
            "it", [_X, Output(_X.copy())], (1, 1, 1), (1025, 1, 1)
        )
