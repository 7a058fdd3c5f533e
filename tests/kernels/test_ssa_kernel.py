"""The SSA temperature as callers see it: kernel or plain MLX, one function either way."""

import mlx.core as mx
import pytest
from kernel_files import numpy_temperature
from methods import error, float64
from place import host_only, without_kernels
from tiny import grafted, tokens

from mlx_selective import ssa_attention
from mlx_selective.attention.ssa import apply_temperature
from mlx_selective.kernels import launched_by, record, ssa

B, H, T, D = 2, 3, 5, 64
#: models whose heads the kernel takes; the builders of this suite make smaller ones
WIDE = {"hidden_size": 256, "head_dim": 64}
DTYPES = [mx.float32, mx.float16, mx.bfloat16]


@pytest.fixture(autouse=True)
def small_arrays_too(monkeypatch):
    monkeypatch.setattr(ssa, "SMALLEST", dict.fromkeys(ssa.SMALLEST, 0))


def rows(dtype=mx.float32, shape=(B, H, T, D)):
    return mx.random.normal(shape, key=mx.random.key(1)).astype(dtype)


def temperatures(shape=(B, H, T, 1)):
    return mx.random.uniform(0.5, 2, shape, key=mx.random.key(2))


def plain(*arguments):
    """apply_temperature without a kernel."""
    with without_kernels(), record() as ran:
        out = apply_temperature(*arguments)
    assert [backend for _, backend, _ in ran] == [None]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(B, H, T), (B, H, T, 1), (1, H, T), (1, 1, T, 1), (H, 1), (1,), ()], ids=str
)
def test_the_kernel_takes_any_temperature_that_broadcasts(shape, dtype):
    x, tau = rows(dtype), temperatures(shape)
    with launched_by(numpy_temperature), record() as ran:
        out = apply_temperature(x, tau)
    assert ran == [("ssa_temperature", "metal", "")]
    assert out.dtype == dtype
    assert mx.array_equal(out, plain(x, tau))


@pytest.mark.parametrize(
    "x, tau, reason",
    [
        (rows(shape=(H, T, D)), temperatures((H, T)), "3 axes, not (B, H, T, D)"),
        (rows().astype(mx.int32), temperatures(), "dtype int32"),
        (rows(shape=(B, H, T, 48)), temperatures(), "head size 48"),
        (rows(shape=(1, 1, 7, D)), temperatures((1, 1, 7)), "only 7 rows"),
        (rows(shape=(0, H, T, D)), temperatures((1, H, T)), "no elements"),
        (rows(shape=(1, H, T, D)), temperatures(), "temperatures (2, 3, 5, 1) for rows (1, 3,"),
        (rows(), temperatures((B, H, T, D)), "temperatures (2, 3, 5, 64) for rows"),
    ],
)
def test_what_the_kernel_does_not_take_runs_in_plain_mlx(x, tau, reason):
    def never(*_, **__):
        raise AssertionError("a kernel ran")

    with launched_by(never), record() as ran:
        out = apply_temperature(x, tau)
    assert len(ran) == 1 and ran[0][:2] == ("ssa_temperature", None)
    assert ran[0].reason.startswith(reason)
    assert mx.array_equal(out, plain(x, tau))


def test_small_arrays_are_not_worth_a_launch(monkeypatch):
    x, tau = rows(), temperatures()
    for smallest, backend, reason in (
        (x.size, "metal", ""),
        (x.size + 1, None, f"{x.size} elements in float32 do not pay"),
    ):
        monkeypatch.setitem(ssa.SMALLEST, mx.float32, smallest)
        with launched_by(numpy_temperature), record() as ran:
            out = apply_temperature(x, tau)
        assert ran == [("ssa_temperature", backend, reason)]
        assert mx.array_equal(out, x * tau)


def test_nothing_is_decided_without_a_temperature():
    with record() as ran:
        assert apply_temperature(rows(), None).shape == (B, H, T, D)
    assert ran == []


@host_only
def test_the_reason_on_a_machine_without_backend():
    with record() as ran:
        apply_temperature(rows(), temperatures())
    assert ran[0].backend is None
    assert ran[0].reason in ("MLX computes on the CPU", "MLX has neither Metal nor CUDA here")


def test_switched_off_no_kernel_runs(monkeypatch):
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    with launched_by(numpy_temperature), record() as ran:
        apply_temperature(rows(), temperatures())
    assert ran == [("ssa_temperature", None, "MLX_SELECTIVE_KERNELS is off")]


# Gradients and transformations --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(B, H, T), (1, H, T, 1), (1,)], ids=str)
def test_every_gradient_is_that_of_the_definition(shape, dtype):
    def loss(x, tau):
        out = apply_temperature(x, tau).astype(mx.float32)
        return (out * mx.sin(out)).sum()

    gradients = mx.grad(loss, argnums=(0, 1))
    x, tau = rows(dtype), temperatures(shape)
    with without_kernels():
        expected = gradients(x, tau)
    with launched_by(numpy_temperature), record() as ran:
        got = gradients(x, tau)
    assert [one.backend for one in ran] == ["metal"]
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and mx.array_equal(one, other)


def lazy_kernel(kernel, *, inputs, output_dtypes, **_):
    """As numpy_temperature without a look at any number, as a GPU's launch is."""
    x, tau, _ = inputs
    return [(x.astype(mx.float32) * tau.reshape(*x.shape[:3], 1)).astype(output_dtypes[0])]


def test_forward_derivatives_are_those_of_the_definition():
    x, tau = rows(), temperatures()
    with without_kernels():
        expected = mx.jvp(apply_temperature, [x, tau], [x, tau])
    with launched_by(lazy_kernel):
        got = mx.jvp(apply_temperature, [x, tau], [x, tau])
    for one, other in zip(got, expected, strict=True):
        assert mx.array_equal(one[0], other[0])


def test_compiled_the_choice_is_on_record_when_traced():
    function = mx.compile(lambda x, tau: apply_temperature(x, tau) + 1)
    with launched_by(lazy_kernel), record() as ran:
        out = [function(rows(), temperatures()) for _ in range(2)]
    # without MLX_DISABLE_COMPILE it is traced once
    assert ran and set(ran) == {("ssa_temperature", "metal", "")}
    assert mx.array_equal(out[0], plain(rows(), temperatures()) + 1)


# Whole layers -------------------------------------------------------------------------------------


def test_the_method_runs_on_the_kernel():
    q, k, v = rows(), rows(shape=(B, 1, T, D)), rows(shape=(B, 1, T, D))
    arguments = q, k, v, temperatures((B, H, T)), temperatures((B, 1, T))
    with without_kernels():
        expected = ssa_attention(*arguments, scale=0.1, key_temperature=temperatures((B, 1, T)))
    with launched_by(numpy_temperature), record() as ran:
        out = ssa_attention(*arguments, scale=0.1, key_temperature=temperatures((B, 1, T)))
    assert [one.backend for one in ran] == ["metal"] * 3
    assert mx.array_equal(out, expected)


def test_a_model_runs_on_the_kernel():
    model = grafted("llama", {"kind": "ssa", "key": True}, **WIDE)
    inputs = tokens(2, 9)
    with without_kernels():
        expected = model(inputs)
    with launched_by(numpy_temperature), record() as ran:
        out = model(inputs)
    # queries, keys and values of each layer
    assert [one.backend for one in ran] == ["metal"] * 3 * len(model.layers)
    assert error(out, float64(expected)) < 1e-6
