"""Arguments that plain MLX takes: kernels take them too, or leave them to it."""

import mlx.core as mx
import numpy as np
import pytest
from place import BACKEND, launching

from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.attention.selective.definition import selective_step
from mlx_selective.kernels import Backend, choice, record
from mlx_selective.kernels import selective as module
from mlx_selective.kernels.selective_chunks import share_queries


def qkv(B=1, H=2, T=9, N=None, seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(B, H, T, 64), (B, H, N or T, 64), (B, H, N or T, 64)]
    return [mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True)]


def step(q, k, v, scale):
    positions = mx.broadcast_to(mx.arange(k.shape[2]), (q.shape[0], k.shape[2]))
    state = {"query_positions": positions[:, -1:], "key_positions": positions}
    F, evicts = mx.zeros(positions.shape), [1] * q.shape[0]
    return selective_step(q, k, v, scale=scale, F=F, evicts=evicts, **state)[0]


CALLS = {
    "selective": (9, lambda q, k, v, scale: selective_attention(q, k, v, scale=scale)),
    "selective token": (1, step),
    "sticks": (9, lambda q, k, v, scale: stick_breaking_attention(q, k, v, scale=scale)[0]),
    "stick token": (1, lambda q, k, v, scale: stick_breaking_attention(q, k, v, scale=scale)[0]),
}


@pytest.fixture(params=CALLS)
def call(request):
    """A method over a prompt or for one token, and its arguments but the scale."""
    T, function = CALLS[request.param]
    return function, qkv(T=T, N=9)


def without_kernels(monkeypatch, function, *arguments):
    with monkeypatch.context() as changed:
        changed.setattr(choice, "find_backend", lambda: Backend(None, "to compare"))
        return function(*arguments)


def test_the_scale_has_a_derivative(call, monkeypatch):
    function, arrays = call
    slope = mx.grad(lambda scale: (function(*arrays, scale) ** 2).sum())
    with launching(), record() as ran:
        ours = slope(mx.array(0.2)).item()
    assert {(one.backend, one.reason) for one in ran} == {(None, "scale of type array")}
    assert abs(ours) > 1e-3
    assert ours == pytest.approx(without_kernels(monkeypatch, slope, mx.array(0.2)).item())


def test_a_scale_of_numpy(call):
    function, arrays = call
    with launching():
        one, other = (function(*arrays, scale) for scale in (np.float32(0.125), 0.125))
        assert mx.array_equal(one, other)


def test_one_argument_moves(call, monkeypatch):
    """MLX then has no tangents for the others."""
    function, (q, k, v) = call

    def along(q):
        out, tangents = mx.jvp(lambda q: function(q, k, v, 0.2), [q], [mx.ones_like(q)])
        return [*out, *tangents]

    with launching():
        ours = along(q)
        mx.eval(ours)
    for one, other in zip(ours, without_kernels(monkeypatch, along, q), strict=True):
        assert mx.allclose(one, other, atol=1e-5)


def test_an_empty_batch(call):
    function, arrays = call
    q, k, v = (mx.zeros((0, *array.shape[1:])) for array in arrays)
    with launching(), record() as ran:
        assert function(q, k, v, 0.2).shape == q.shape
    assert [(one.backend, one.reason) for one in ran] == [(None, "no elements")]


@pytest.mark.parametrize("dtype", [mx.int64, mx.uint32, mx.int16])
def test_positions_and_f_of_other_dtypes(dtype):
    q, k, v = qkv()
    F = mx.array([[0, 1, 0.5, 2, 0, 0, 0, 0, 0]])
    with launching(), record() as ran:
        one, other = (
            selective_attention(
                q, k, v, scale=0.2, key_positions=mx.arange(9).astype(kind), F=F.astype(of)
            )
            for kind, of in ((mx.int32, mx.float32), (dtype, mx.float16))
        )
        assert mx.array_equal(one, other)
    assert None not in {one.backend for one in ran}


@pytest.mark.parametrize("scale", [2.0**-61, 2.0**61, float("inf"), 0, -1.0])
def test_a_scale_beyond_float32(scale):
    q, k, v = qkv()
    with launching(), record() as ran:
        selective_attention(q, k, v, scale=scale)
    assert [(one.backend, one.reason) for one in ran] == [(None, f"scale {scale}")]


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_masks_never_have_more_elements_than_32_bits_count(backend):
    blocks = module.BLOCKS[backend, 2][64]
    for H in (1, 2, 8):
        nbytes = 2 * H * 131072 * 64 * 2
        room, chunks = share_queries(1, H, 131072, 131072, nbytes, 2, blocks)
        assert room < 2**31 and sum(chunk.rows for chunk in chunks) == 131072


@pytest.mark.parametrize("axis", [2, 3])
def test_keys_and_values_backwards(call, axis, monkeypatch):
    """Their strides are negative: the first element is not the lowest in memory."""
    function, (q, k, v) = call
    back = (slice(None),) * axis + (slice(None, None, -1),)

    def backwards(k, v):
        return function(q, k[back], v[back], 0.2)

    with launching(), record() as ran:
        ours = backwards(k, v)
        mx.eval(ours)
    assert {one.backend for one in ran} == {BACKEND}
    assert mx.allclose(ours, without_kernels(monkeypatch, backwards, k, v), atol=1e-5)
