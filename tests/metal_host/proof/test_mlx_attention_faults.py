"""Mistakes planted into MLX's attention kernels are found; what is harmless is not reported.

The changed text is made in memory from the header in the wheel.
"""

import re

import mlx.core as mx
import pytest

from metal_host import Fault
from metal_host.proof.mlx_attention import (
    STEEL,
    VECTOR,
    Problem,
    steel,
    text_of,
    vector,
    vector_two_pass,
)
from metal_host.proof.versions import seen_in

STEEL_TEXT, VECTOR_TEXT = text_of(STEEL), text_of(VECTOR)
BARRIER = re.compile(r"\bthreadgroup_barrier\(mem_flags::\w+\);")
SIMD_BARRIER = re.compile(r"\bsimdgroup_barrier\(mem_flags::\w+\);")
#: two blocks of keys, so that the loop's start follows its end
TWO_BLOCKS = Problem.random(mx.float32, T=32, N=64)
SEEDS = range(6)


def gqa(problem, **options):
    return vector_two_pass(problem, heads_together=4, **options)


def replaced(text, old, new, occurrence=0):
    """`text` with one occurrence of `old`, which must be there, replaced."""
    pieces = text.split(old)
    assert len(pieces) > occurrence + 1, f"{old!r} is not in the header {occurrence + 1} times"
    return old.join(pieces[: occurrence + 1]) + new + old.join(pieces[occurrence + 1 :])


def without(pattern, text, number):
    """`text` without its barrier of that number, from 1."""
    match = list(pattern.finditer(text))[number - 1]
    return text[: match.start()] + ";" + text[match.end() :]


def faults(kernel, problem, seeds=SEEDS, **options):
    """The faults that the runs of different order end with, and the results of the others."""
    found, results = [], []
    for seed in seeds:
        try:
            results.append(kernel(problem, seed=seed, **options).out)
        except Fault as fault:
            found.append(fault)
    return found, results


def filled(text, after, simdgroup, lane, *arrays):
    """`text` in which the threadgroup's arrays start as zeros.

    Else reading what nobody wrote yet, which many an order does first, would be reported as such.
    """
    lines = [
        f"for (uint at = {lane}; at < sizeof({a}) / sizeof({a}[0]); at += 32) {a}[at] = 0;"
        for a in arrays
    ]
    fill = f"if ({simdgroup} == 0) {{ {' '.join(lines)} }}"
    barrier = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
    return replaced(text, after, f"{after} {fill} {barrier}")


# Barriers of steel_attention by their number in the text: what each keeps apart.
#   number  simdgroups along D (WN)  what stands where one of the two accesses is
STEEL_BARRIERS = [
    (2, 1, "loader.h"),  # the last block's values are read, the next keys written
    (2, 2, "loader.h"),
    (3, 1, "mma.h"),  # keys (and queries) written, read
    (3, 2, "mma.h"),
    (4, 2, "slot[base"),  # keys read, partial logits written in their place
    (5, 2, "peer[base"),  # partial logits written, read by the peer
    (6, 1, "loader.h"),  # keys read, values written in their place
    (6, 2, "loader.h"),  # partial logits read, values written in their place
    (7, 1, "mma.h"),  # values written, read
    (7, 2, "mma.h"),
]
#: the first, before which nothing was in threadgroup memory, and the last: mem_none, after its use
STEEL_HARMLESS = [1, 8]


def test_the_tables_have_every_barrier():
    numbers = {number for number, *_ in STEEL_BARRIERS} | set(STEEL_HARMLESS)
    assert len(BARRIER.findall(STEEL_TEXT)) == len(numbers) == max(numbers)
    assert len(BARRIER.findall(VECTOR_TEXT)) == len(VECTOR_BARRIERS)
    assert all("mem_none" in barrier for barrier in SIMD_BARRIER.findall(STEEL_TEXT))


@pytest.mark.parametrize("number, wn, where", STEEL_BARRIERS)
def test_barrier_of_steel_attention(number, wn, where):
    source = without(BARRIER, STEEL_TEXT, number)
    threads = "simd_group_id", "simd_lane_id"
    source = filled(source, "threadgroup T* Vs = KV_smem;", *threads, "Q_smem", "KV_smem")
    found, results = faults(steel, TWO_BLOCKS, source=source, wn=wn)
    assert not results and {fault.kind for fault in found} == {"race"}
    assert all(where in fault.where + fault.other_where for fault in found)


@pytest.mark.parametrize("wn", [1, 2])
def test_barriers_that_steel_attention_could_do_without(wn):
    """Those of simdgroups are all mem_none: they order no memory."""
    source = SIMD_BARRIER.sub(";", STEEL_TEXT)
    for number in sorted(STEEL_HARMLESS, reverse=True):
        source = without(BARRIER, source, number)
    found, results = faults(steel, TWO_BLOCKS, source=source, wn=wn)
    assert not found
    assert all(mx.array_equal(result, steel(TWO_BLOCKS, wn=wn).out) for result in results)


def test_one_block_of_keys_needs_no_barrier_at_the_start_of_the_loop():
    one_block = Problem.random(mx.float32, T=32, N=32)
    assert not faults(steel, one_block, source=without(BARRIER, STEEL_TEXT, 2))[0]


SINGLE = Problem.random(mx.float32, T=1, N=40)
EIGHT_HEADS = Problem.random(mx.float32, H=8, group=8, T=1, N=40)
# Of sdpa_vector.h, in the order of the text; all matter where a thread has two values or more.
VECTOR_BARRIERS = [
    (1, vector, SINGLE),  # maxima and sums written, read by all
    (2, vector, SINGLE),  # outputs written, read transposed
    (3, vector, SINGLE),  # outputs read, the next written
    (4, gqa, EIGHT_HEADS),  # partial outputs written, read by other heads' simdgroups
    (5, vector_two_pass, SINGLE),  # as 2 and 3, in the second pass
    (6, vector_two_pass, SINGLE),
]


#: the last declaration, the names of the simdgroup and the lane, and the threadgroup's arrays
VECTOR_ARRAYS = {
    vector: (
        *("threadgroup U sum_exp_scores[BN];", "simd_gid", "simd_lid"),
        *("outputs", "max_scores", "sum_exp_scores"),
    ),
    gqa: ("threadgroup U mx_sh[G * HPT];", "g", "simd_lid", "o_sh", "se_sh", "mx_sh"),
    vector_two_pass: (
        *("thread U o[elem_per_thread] = {0};\n  threadgroup U outputs[BN * BD];", "simd_gid"),
        *("simd_lid", "outputs"),
    ),
}


@pytest.mark.parametrize("number, kernel, problem", VECTOR_BARRIERS)
def test_barrier_of_sdpa_vector(number, kernel, problem):
    source = filled(without(BARRIER, VECTOR_TEXT, number), *VECTOR_ARRAYS[kernel])
    found, results = faults(kernel, problem, source=source)
    assert not results and {fault.kind for fault in found} == {"race"}


def test_a_barrier_too_few_may_also_show_as_an_uninitialised_read():
    found, results = faults(vector, SINGLE, source=without(BARRIER, VECTOR_TEXT, 1))
    assert not results and "uninitialised read" in {fault.kind for fault in found}


# Other mistakes

ODD = Problem.random(mx.float32, T=33, N=77)
LOAD_Q, LOAD_V = "loader_q.load_unsafe();", "// Load V into registers"
AGGREGATE = "// Now we need to aggregate all the outputs"
SUM = "score = simd_sum(score);"
BARRIER_OF_SOME = "\n if ({}) {{ threadgroup_barrier(mem_flags::mem_none); }}"
#: name -> kernel, problem, what is replaced by what in its text, the kind of the fault
PLANTED = {
    "queries not loaded": (steel, TWO_BLOCKS, LOAD_Q, "", "uninitialised read"),
    "a barrier that one simdgroup leaves out": (
        *(steel, TWO_BLOCKS, LOAD_V, LOAD_V + BARRIER_OF_SOME.format("simd_group_id != 1")),
        "divergent barrier",
    ),
    "threads that return before a barrier": (
        *(steel, ODD, LOAD_Q, LOAD_Q + "} if (tid.x == 1 && tm >= 8) { return;"),
        "divergent barrier",
    ),
    "blocks of queries written to one place": (
        *(steel, ODD, "tidl.x * BQ * params->O_strides[2]", "0"),
        "race",
    ),
    "an output read before it is written": (
        *(vector, SINGLE, "out[i] = static_cast", "out[i] += static_cast"),
        "uninitialised read",
    ),
    "a key too many": (
        *(vector, SINGLE, "i = simd_gid; i < N;", "i = simd_gid; i <= N;"),
        "out of bounds",
    ),
    "more partial outputs than the threadgroup's array": (
        *(vector, SINGLE, "outputs[simd_lid * BD", "outputs[(simd_lid + 1) * BD"),
        "out of bounds",
    ),
    "a barrier that a simdgroup leaves out": (
        *(vector, SINGLE, AGGREGATE, AGGREGATE + BARRIER_OF_SOME.format("simd_gid < 31")),
        "divergent barrier",
    ),
    "a sum that a lane leaves out": (
        *(vector, SINGLE, SUM, f"if (simd_lid < 31) {SUM}"),
        "divergent simdgroup operation",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name):
    kernel, problem, old, new, kind = PLANTED[name]
    source = replaced(STEEL_TEXT if kernel is steel else VECTOR_TEXT, old, new)
    found, results = faults(kernel, problem, range(3), source=source)
    assert not results
    assert {fault.kind for fault in found} == {kind}, found[0]


@pytest.mark.parametrize("claim", ["align_Q", "align_K"])
def test_lengths_claimed_to_be_whole_blocks(claim):
    found, results = faults(steel, ODD, range(3), **{claim: True})
    assert not results and {fault.kind for fault in found} == {"out of bounds"}


def test_a_pointer_without_its_address_space():
    source = replaced(STEEL_TEXT, "const threadgroup AccumType* peer", "const AccumType* peer")
    with pytest.raises(Fault, match=r"address space.*const AccumType\* peer"):
        steel(TWO_BLOCKS, wn=2, source=source)


def test_more_threadgroup_memory_than_there_is():
    with pytest.raises(Fault, match="threadgroup memory: .* 53760 bytes of 32768"):
        steel(Problem.random(mx.float32, D=256))


@seen_in("mlx", "0.32.4")
def test_two_simdgroups_write_one_logarithm():
    """In MLX's own text: with WN = 2 both halves of D store the same sum, which is harmless."""
    with pytest.raises(Fault, match="race: .* of the device buffer `lse`") as caught:
        steel(TWO_BLOCKS, wn=2, lse=True)
    assert "steel_attention.h" in caught.value.where
    assert abs(caught.value.thread - caught.value.other_thread) // 32 == 1
