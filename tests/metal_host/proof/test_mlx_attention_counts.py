"""Reports of MLX's attention kernels, and of the project's, equal closed formulas."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from metal_host.proof.attention_counts import (
    own_counts,
    steel_counts,
    two_pass_counts,
    vector_counts,
    visits,
)
from metal_host.proof.compare_attention import figures, reports
from metal_host.proof.mlx_attention import Problem, steel, vector, vector_two_pass

HALF, FLOAT = mx.float16, mx.float32
CONSTANTS = {"sizes", "scale"}  # what the project's kernel reads from constant memory


def check(report, expected):
    """Every figure of the formula, and no byte elsewhere."""
    for name, value in expected.items():
        found = getattr(report, name)
        if isinstance(value, dict):
            found = {k: v for k, v in found.items() if v and k not in CONSTANTS}
        assert found == value, name


STEEL = {
    "whole blocks": ({"T": 64, "N": 96}, {}),
    "odd lengths": ({"T": 33, "N": 77}, {"lse": True}),
    "causal": ({"T": 96, "N": 96, "mask": "causal"}, {}),
    "causal, odd": ({"T": 70, "N": 77, "mask": "causal", "H": 2, "group": 2}, {}),
    "causal, few queries": ({"T": 5, "N": 77, "mask": "causal", "D": 128}, {}),
    "boolean": ({"T": 33, "N": 77, "mask": "boolean"}, {}),
    "additive and sinks": ({"T": 33, "N": 77, "mask": "additive", "sinks": True, "D": 80}, {}),
    "float": ({"T": 40, "N": 64, "dtype": FLOAT}, {}),
    "two simdgroups to a row": ({"T": 40, "N": 77, "mask": "causal", "dtype": FLOAT}, {"wn": 2}),
    "two, queries staged": ({"T": 40, "N": 77, "mask": "boolean", "D": 128}, {"wn": 2}),
}


@pytest.mark.parametrize("name", STEEL)
def test_steel_attention(name):
    shape, options = STEEL[name]
    problem = Problem.random(**{"dtype": HALF, "B": 2} | shape)
    report = steel(problem, **options).report
    check(report, steel_counts(problem, **options))
    assert report.threadgroup_memory <= 32768


def test_visited_blocks_are_those_counted_by_hand():
    at = visits(Problem.random(HALF, T=70, N=77, mask="causal"))
    # queries 0-31 see keys up to 38, 32-63 up to 70, 64-69 up to 76; blocks of 32
    assert (at.blocks, at.rows, at.groups) == (2 + 3 + 3, 64 + 77 + 77, 3)
    assert at.cells == 32 * 64 + 32 * 77 + 6 * 77
    at = visits(Problem.random(HALF, T=64, N=64, D=128))
    assert (at.blocks, at.rows, at.groups, at.cells) == (8, 128, 2, 64 * 64)  # blocks of 16


VECTOR = {
    "plain": {"T": 1, "N": 70},
    "causal": {"T": 3, "N": 70, "mask": "causal", "H": 4, "group": 2, "D": 128},
    "boolean": {"T": 2, "N": 40, "mask": "boolean"},
    "additive and sinks": {"T": 2, "N": 40, "mask": "additive", "sinks": True},
    "values of another size": {"T": 1, "N": 33, "D": 192, "Dv": 128, "dtype": FLOAT},
}


@pytest.mark.parametrize("name", VECTOR)
def test_sdpa_vector(name):
    problem = Problem.random(**{"dtype": HALF, "B": 2} | VECTOR[name])
    check(vector(problem).report, vector_counts(problem))


@pytest.mark.parametrize("blocks, tokens", [(32, 4), (64, 1)])
@pytest.mark.parametrize("shape", [{"T": 1, "N": 150}, {"T": 3, "N": 170, "mask": "causal"}])
def test_sdpa_vector_two_pass(shape, blocks, tokens):
    problem = Problem.random(HALF, 2, 4, 2, **shape)
    found = vector_two_pass(problem, blocks=blocks, tokens=tokens).reports
    for report, expected in zip(found, two_pass_counts(problem, blocks, tokens), strict=True):
        check(report, expected)


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_own_kernel_beside_steel_attention(dtype, D):
    problem = Problem.random(dtype, 1, 2, 2, 50, 77, D, mask="causal")
    both = theirs, ours = reports(problem)
    check(theirs, steel_counts(problem))
    check(ours, own_counts(problem))
    theirs, ours = (figures(report, problem) for report in both)
    products, device = (
        [sum(v for k, v in f.items() if k.startswith(word)) for f in (ours, theirs)]
        for word in ("multiply", "device")
    )
    assert products[0] <= 1.05 * products[1]
    assert device[0] <= 1.25 * device[1]


@pytest.mark.parametrize("as_module", [False, True])
def test_the_command(as_module):
    here = Path(__file__).parent
    command = ["-m", "metal_host.proof.compare_attention"]
    if not as_module:
        command = [here / "compare_attention.py"]
    command += ["--heads", "1", "--lengths", "32", "--sizes", "64"]
    run = subprocess.run(
        [sys.executable, *command], cwd=here.parents[1], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert "B 1, H 1, T 32, N 32, D 64, float16, causal" in run.stdout
    assert "multiply-accumulates of matrices" in run.stdout and "1.000" in run.stdout
