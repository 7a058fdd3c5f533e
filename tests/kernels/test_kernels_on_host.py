"""The package's kernels, run as Metal text on the processor: functions, layers, the doctor."""

import dataclasses

import metal_host
import mlx.core as mx
import pytest
from methods import error, float64
from tiny import grafted, tokens

from mlx_selective.attention.ssa import apply_temperature
from mlx_selective.cli import main
from mlx_selective.doctor import kernel_cases
from mlx_selective.doctor import kernels as doctor
from mlx_selective.kernels import launched_by, record, ssa

pytest.importorskip("ziglang")


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    monkeypatch.setattr(ssa, "SMALLEST", dict.fromkeys(ssa.SMALLEST, 0))
    with launched_by(metal_host.execute), record() as ran:
        yield ran
    assert any(one.backend == "metal" for one in ran)


@pytest.mark.parametrize("shape", [(1, 1, 8, 64), (2, 3, 11, 80), (1, 2, 16, 128)], ids=str)
def test_rows_of_any_strides(shape, on_host):
    B, H, T, D = shape
    tau = mx.random.uniform(0.5, 2, (B, H, T))
    for x in (
        mx.random.normal(shape),
        mx.random.normal((B, T, H, D)).swapaxes(1, 2),
        mx.random.normal((B, H, 2 * T, D))[:, :, ::2],
        mx.random.normal((B, H, D, T)).swapaxes(2, 3),
        mx.broadcast_to(mx.random.normal((1, 1, T, D)), shape),
    ):
        assert mx.array_equal(apply_temperature(x, tau), x * tau[..., None])
    assert len(on_host) == 5


def test_gradients_beside_a_kernel_that_runs():
    x, tau = mx.random.normal((1, 2, 9, 64)), mx.random.uniform(0.5, 2, (1, 2, 9))
    d_x, d_tau = mx.grad(lambda x, tau: apply_temperature(x, tau).square().sum(), (0, 1))(x, tau)
    assert mx.allclose(d_x, 2 * x * tau[..., None] ** 2)
    assert mx.allclose(d_tau, (2 * x**2).sum(-1) * tau, rtol=1e-4)


def test_a_model_of_tempered_layers(on_host, monkeypatch):
    model = grafted("llama", {"kind": "ssa", "key": True}, hidden_size=256, head_dim=64)
    out = model(tokens(1, 9))
    assert [one.backend for one in on_host] == ["metal"] * 3 * len(model.layers)
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    assert error(out, float64(model(tokens(1, 9)))) < 1e-6


@pytest.mark.parametrize("check", kernel_cases.CHECKS, ids=lambda check: check.name)
def test_the_doctor_finds_every_kernel_right(check, monkeypatch, capsys):
    small = dataclasses.replace(check, timed=(1, 2, 8), head_sizes=check.head_sizes[:1])
    monkeypatch.setattr(doctor, "CHECKS", [small])
    monkeypatch.setattr(doctor, "_ROUNDS", range(1, 2))
    code = main(["doctor", "--kernels"])
    assert code == 0, capsys.readouterr().out
