"""The attention kernels that MLX ships, run here, agree with MLX on the processor."""

from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from covering import covering, every

from metal_host.proof.mlx_attention import (
    Problem,
    steel,
    steel_blocks,
    text_of,
    tolerance,
    vector,
    vector_two_pass,
)
from metal_host.proof.numbers import error

DTYPES = [mx.float32, mx.float16, mx.bfloat16]
MASKS = ["none", "causal", "additive", "boolean"]
STEEL = {
    "dtype": DTYPES,
    "D": [64, 80, 128],
    "wn": [1, 2],
    "mask": MASKS,
    "lengths": [(33, 77), (64, 128), (100, 33), (1, 32)],
    "heads": [(1, 1), (4, 2), (3, 3)],  # H, group
    "sinks": [False, True],
    "lse": [False, True],
    "by_position": [False, True],
}
VECTOR = {
    "dtype": DTYPES,
    "D": [64, 128, 96],
    "mask": MASKS,
    "lengths": [(1, 20), (3, 150), (8, 37), (5, 5)],
    "heads": [(1, 1, 1), (2, 4, 2), (1, 4, 4)],  # B, H, group
    "sinks": [False, True],
    "by_position": [False, True],
    "kernel": [vector, vector_two_pass],
}


def score_exchange_fits(dtype, D):
    """What a static_assert of the header asks for WN = 2: two floats a lane and fragment of S."""
    _, bk = steel_blocks(D)
    pad = 16 // dtype.size
    return 4 * 2 * (bk // 8) * 2 * 32 * 4 <= max((bk + pad) * D, bk * (D + pad)) * dtype.size


def steel_allowed(dtype, D, wn, mask, lengths, lse, **_):
    if wn == 2 and (lse or D % 16 or not score_exchange_fits(dtype, D)):
        return False  # lse: see test_mlx_attention_faults.py
    if wn == 1 and D == 256 and dtype == mx.float32:
        return False  # more threadgroup memory than there is
    return mask != "causal" or lengths[0] <= lengths[1]


def vector_allowed(heads, by_position, lengths, **_):
    return lengths[0] * heads[2] <= 32 and not (by_position and heads[0] > 1)


def names(case):
    return "-".join(
        getattr(value, "__name__", str(value)).replace("mlx.core.", "").replace(", ", ",")
        for value in case.values()
    )


def check(result, problem):
    """Returns the share of the tolerance that the error takes."""
    truth, lse = problem.truth()
    found, most = error(result.out, truth), tolerance(problem)
    assert np.isfinite(found) and found <= most
    assert error(problem.raised().mlx(), truth) < 1e-6  # the truth is MLX's
    if result.lse is not None:
        assert np.abs(result.lse - lse).max() < 3e-6
    assert not sum(sum(report.unwritten.values()) for report in result.reports)
    return found / most


def run_steel(dtype, D, wn, mask, lengths, heads, sinks, lse, by_position, seed=0):
    (T, N), (H, group) = lengths, heads
    problem = Problem.random(
        dtype, 1 + seed % 2, H, group, T, N, D, mask=mask, sinks=sinks, seed=seed
    )
    options = {"wn": wn, "lse": lse, "by_position": by_position}
    return check(steel(problem, **options, seed=seed), problem)


def run_vector(dtype, D, mask, lengths, heads, sinks, by_position, kernel, seed=0):
    (T, N), (B, H, group) = lengths, heads
    problem = Problem.random(dtype, B, H, group, T, N, D, mask=mask, sinks=sinks, seed=seed)
    return check(kernel(problem, by_position=by_position, seed=seed), problem)


STEEL_CASES, VECTOR_CASES = covering(STEEL, steel_allowed), covering(VECTOR, vector_allowed)


@pytest.mark.parametrize("seed, case", list(enumerate(STEEL_CASES)), ids=map(names, STEEL_CASES))
def test_steel_attention(seed, case):
    run_steel(**case, seed=seed)


@pytest.mark.parametrize("seed, case", list(enumerate(VECTOR_CASES)), ids=map(names, VECTOR_CASES))
def test_sdpa_vector(seed, case):
    run_vector(**case, seed=seed)


@pytest.mark.parametrize("kernel", [vector, vector_two_pass])
def test_values_of_another_size(kernel):
    problem = Problem.random(mx.float16, 1, 4, 2, 2, 45, D=192, Dv=128, mask="causal")
    check(kernel(problem), problem)


@pytest.mark.parametrize("heads_together, N", [(4, 70), (2, 20)])
def test_first_pass_of_eight_heads_to_a_key_head(heads_together, N):
    problem = Problem.random(mx.float16, 2, 16, 8, 1, N, D=64, seed=N)
    check(vector_two_pass(problem, heads_together=heads_together), problem)


@pytest.mark.parametrize("kernel, T", [(steel, 40), (vector, 3), (vector_two_pass, 3)])
def test_order_of_threads_changes_nothing(kernel, T):
    problem = Problem.random(mx.float32, 1, 2, 1, T, 50, mask="causal")
    first, *others = (kernel(problem, seed=seed).out for seed in range(4))
    assert all(mx.array_equal(first, other) for other in others)


def test_parameters_are_those_of_the_header():
    text = text_of("mlx/backend/metal/kernels/steel/attn/params.h")
    found = []
    for line in text.split("struct AttnParams {")[1].split("};")[0].splitlines():
        if ";" in line:
            found.append(line.split(";")[0].strip())
    order = "B H D qL kL gqa_factor scale NQ NK NQ_aligned NK_aligned qL_rem kL_rem qL_off".split()
    kinds = ["int"] * 6 + ["float"] + ["int"] * 7
    names = [f"{kind} {name}" for kind, name in zip(kinds, order, strict=True)]
    assert found == names + [f"int64_t {letter}_strides[3]" for letter in "QKVO"]


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steel_attention_every_shape(dtype, D):
    """But sinks, heads and layouts, which take turns."""
    lengths = [*STEEL["lengths"], (32, 64), (77, 100), (31, 1)]
    factors = {"dtype": [dtype], "D": [D], "wn": [1, 2], "mask": MASKS, "lengths": lengths}
    shares = []
    for seed, case in enumerate(every(factors, partial(steel_allowed, lse=False))):
        for name in ("heads", "sinks", "lse", "by_position"):
            case[name] = STEEL[name][seed % 7 % len(STEEL[name])]
        case["lse"] &= case["wn"] == 1
        shares.append(run_steel(**case, seed=seed))
    print(len(shares), max(shares))


@pytest.mark.slow
@pytest.mark.parametrize("D", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sdpa_vector_every_shape(dtype, D):
    lengths = [*VECTOR["lengths"], (1, 70), (1, 1)]
    factors = VECTOR | {"dtype": [dtype], "D": [D], "lengths": lengths, "by_position": [False]}
    shares = []
    for seed, case in enumerate(every(factors, vector_allowed)):
        case["by_position"] = seed % 3 == 0 and case["heads"][0] == 1
        shares.append(run_vector(**case, seed=seed))
    print(len(shares), max(shares))
