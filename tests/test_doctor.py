"""The self-check finds what is wrong, and agrees with the tests' oracle."""

import numpy as np
import oracle
import pytest
from methods import random_qkv

from mlx_selective.cli import main
from mlx_selective.doctor import checks, definitions


def test_passes_here(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("mlx ") for line in lines)
    assert [line.split()[0] for line in lines if line.endswith("ok")] == [
        "selective",
        "ssa",
        "stick_breaking",
    ]


@pytest.mark.parametrize("name", ["selective", "ssa", "stick_breaking"])
@pytest.mark.parametrize("fault", [1.001, float("nan")])
def test_a_wrong_method_fails(name, fault, monkeypatch, capsys):
    right = getattr(checks, f"{name}_attention")

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        return tuple(r * fault for r in result) if isinstance(result, tuple) else result * fault

    monkeypatch.setattr(checks, f"{name}_attention", wrong)
    assert main(["doctor"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert line.startswith(name)


@pytest.mark.parametrize(
    "weights, truth",
    [
        (definitions.selective, lambda *qkv: oracle.selective(*qkv)[0]),
        (definitions.softmax, oracle.causal_softmax),
        (definitions.stick_breaking, lambda *qkv: oracle.stick_breaking(*qkv)[0]),
    ],
)
def test_its_definitions_are_the_oracles(weights, truth):
    """Two formulations, written apart."""
    _, (q, k, v) = random_qkv(7, T=21)
    assert np.allclose(definitions.attend(weights, q, k, v, 0.4), truth(q, k, v, 0.4), atol=1e-12)
