"""Stick-breaking's kernel as callers see it: what it takes, and its gradients."""

import mlx.core as mx
import pytest
from place import BACKEND, launching
from stick_breaking_cases import by_kernel, normal, plain

from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels import launched_by, record
from mlx_selective.kernels.stick_breaking import BLOCKS, shared_bytes, stick_breaking

CALL = {"scale": 0.125, "definition": plain_stick_breaking}


def never(*_, **__):
    raise AssertionError("a kernel ran")


def stand_in(kernel, *, inputs, output_dtypes, **_):
    """What the kernel computes, by plain MLX; lazy, as a GPU's launch is."""
    q, k, v, begins, *_ = inputs
    out, remainder = plain(q, k, v, 0.125, begins=begins[: q.shape[0]])
    return [out.astype(output_dtypes[0]), remainder]


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda q, k, v: (q[0], k, v), "3 axes, not (B, H, T, D)"),
        (lambda q, k, v: (q, k[0], v[0]), "3 axes, not (B, H, T, D)"),
        (lambda q, k, v: (q.astype(mx.int32), k, v), "dtype int32"),
        (lambda q, k, v: (q.astype(mx.float16), k, v), "dtypes that differ"),
        (lambda q, k, v: (q, k, v.astype(mx.bfloat16)), "dtypes that differ"),
        (lambda q, k, v: (q[..., :48], k[..., :48], v), "head size 48"),
        (lambda q, k, v: (q, k, mx.concatenate([v, v], 3)), "shapes (2, 4, 5, 64), (2, 2, 9, 64)"),
        (lambda q, k, v: (q, k, v[..., :48]), "head size 48"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), "shapes"),
        (lambda q, k, v: (q[:, :3], k, v), "shapes"),  # 3 heads for 2
        (lambda q, k, v: (q, k[:, :, :4], v[:, :, :4]), "shapes"),
        (lambda q, k, v: (q[:, :, :0], k, v), "no elements"),
        (lambda q, k, v: (q[:1], k, v), "shapes"),
    ],
)
def test_what_the_kernel_does_not_take(change, reason):
    arrays = change(*normal(T=5, earlier=4, heads=(4, 2), B=2))
    with launched_by(never), record() as ran:
        assert stick_breaking(*arrays, **CALL) is None
    assert [one[:2] for one in ran] == [("stick_breaking_attention", None)]
    assert reason in ran[0].reason


@pytest.mark.parametrize("scale", [0, -0.125, float("inf"), float("nan")])
def test_scales_that_it_does_not_take(scale):
    with launched_by(never), record() as ran:
        assert stick_breaking(*normal(), **CALL | {"scale": scale}) is None
    assert ran[0].reason == f"scale {scale}"


@pytest.mark.parametrize("begins", [mx.array([0]), mx.array([0.0, 0.0]), mx.array(0)], ids=str)
def test_begins_that_it_does_not_take(begins):
    with launched_by(never), record() as ran:
        assert stick_breaking(*normal(B=2), **CALL, begins=begins) is None
    assert ran[0].reason.startswith("begins of shape")


def test_arrays_that_thirty_two_bits_do_not_count():
    q, k, v = normal(mx.float16, D=128)
    k, v = (mx.broadcast_to(array[:, :, :1], (1, 1, 2**24, 128)) for array in (k, v))
    with launched_by(never), record() as ran:
        assert stick_breaking(q, k, v, **CALL) is None
    assert ran[0].reason == "2147483648 elements, more than 32 bits count"


def test_where_nothing_runs_kernels_it_says_so(monkeypatch):
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    with launched_by(never), record() as ran:
        assert stick_breaking(*normal(), **CALL) is None
    assert ran[0].reason == "MLX_SELECTIVE_KERNELS is off"


@pytest.mark.parametrize("rows", [1, 7, 8, 11])
def test_begins_of_any_batch(rows):
    """Fewer than eight numbers would be in another address space."""
    q, k, v = normal(T=3, earlier=9, heads=(1, 1), B=rows)
    begins = mx.arange(rows).astype(mx.int32)
    got, expected = by_kernel(q, k, v, 0.125, begins=begins), plain(q, k, v, 0.125, begins=begins)
    for one, other in zip(got, expected, strict=True):
        assert mx.abs(one - other).max().item() < 3e-6


def test_cards_with_ninety_nine_kilobytes_have_room():
    dtypes = {2: mx.float16, 4: mx.float32}
    for (backend, size), sizes in BLOCKS.items():
        for D, blocks in sizes.items():
            assert backend != "cuda" or shared_bytes(blocks, D, dtypes[size]) <= 99 * 1024


# Gradients and transformations --------------------------------------------------------------------


def loss(function):
    def of(*arrays):
        out, remainder = function(*arrays)
        return (mx.sin(out) * out).sum() + (remainder * mx.arange(out.shape[2])).sum()

    return of


@pytest.mark.parametrize("begins", [None, mx.array([3, 0])], ids=["bare", "padded"])
@pytest.mark.parametrize("attend_current", [False, True])
def test_gradients_are_those_of_the_definition(attend_current, begins):
    arrays = normal(T=9, earlier=4, heads=(4, 2), B=2)
    options = {"attend_current": attend_current, "begins": begins}
    expected = mx.grad(loss(lambda *qkv: plain(*qkv, 0.125, **options)), (0, 1, 2))(*arrays)
    with launching(), record() as ran:
        function = loss(lambda *qkv: stick_breaking(*qkv, **CALL, **options))
        got = mx.grad(function, (0, 1, 2))(*arrays)
    assert [one.backend for one in ran] == [BACKEND]
    # the loss's own derivative is taken at the kernel's output
    for one, other in zip(got, expected, strict=True):
        assert mx.allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_gradients_of_every_dtype_are_the_definitions(dtype):
    arrays = normal(dtype, T=9, earlier=4, heads=(4, 2), B=2)
    expected = mx.grad(loss(lambda *qkv: plain(*qkv, 0.125)), (0, 1, 2))(*arrays)
    with launched_by(stand_in):
        got = mx.grad(loss(lambda *qkv: stick_breaking(*qkv, **CALL)), (0, 1, 2))(*arrays)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype and mx.array_equal(one, other)


def test_along_a_direction():
    arrays, directions = normal(T=6, earlier=2), normal(T=6, earlier=2, seed=1)
    expected = mx.jvp(lambda *qkv: plain(*qkv, 0.125), arrays, directions)[1]
    with launched_by(stand_in):
        got = mx.jvp(lambda *qkv: stick_breaking(*qkv, **CALL), arrays, directions)[1]
    for one, other in zip(got, expected, strict=True):
        assert mx.allclose(one, other, atol=1e-6)
