"""The methods' functions and layers where kernels run: as in plain MLX, and no caller sees it."""

import mlx.core as mx
import pytest
from feeding import ROUNDING, difference, feed
from methods import error, float64
from place import BACKEND, launching
from tiny import grafted, tokens

from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.kernels import record

SELECTIVE = ["selective_sums", "selective_mask", "selective_attention", "selective_decode"]
STICKS = ["stick_breaking_attention", "stick_breaking_decode"]
CHUNKS = [12, 1, 1, 6]


def plainly(monkeypatch, function):
    with monkeypatch.context() as patch:
        patch.setenv("MLX_SELECTIVE_KERNELS", "off")
        return function()


@pytest.mark.parametrize(
    "attention, kernels",
    [
        ({"kind": "selective"}, SELECTIVE),
        ({"kind": "selective", "budget": 7}, SELECTIVE),
        ({"kind": "stick_breaking"}, STICKS),
        ({"kind": "stick_breaking", "attend_current": True}, STICKS),
        ({"kind": "stick_breaking", "remainder": "value"}, STICKS),
    ],
    ids=str,
)
def test_a_model_fed_in_chunks(attention, kernels, monkeypatch):
    model = grafted("llama", attention, hidden_size=256, head_dim=64)
    ids = tokens(2, 20)
    with launching(), record() as ran:
        logits, cache = feed(model, ids, CHUNKS)
        mx.eval(logits, [layer.state for layer in cache])
    assert {one.kernel for one in ran if one.backend} == set(kernels)
    expected, plain_cache = plainly(monkeypatch, lambda: feed(model, ids, CHUNKS))
    assert difference(logits, expected) < ROUNDING
    for one, other in zip(cache, plain_cache, strict=True):
        if attention["kind"] == "selective":
            assert mx.array_equal(one.positions, other.positions)


@pytest.mark.parametrize("function", [selective_attention, stick_breaking_attention])
def test_gradients_of_the_functions(function, monkeypatch):
    q, k, v = (mx.random.normal((1, heads, 21, 64)) for heads in (4, 2, 2))

    def loss(q, k, v):
        out = function(q, k, v, scale=0.3)
        out = out if isinstance(out, mx.array) else out[0] + out[1][..., None]
        return (out**2).sum()

    with launching(), record() as ran:
        ours = mx.grad(loss, (0, 1, 2))(q, k, v)
        mx.eval(ours)
    assert BACKEND in {one.backend for one in ran}
    expected = plainly(monkeypatch, lambda: mx.grad(loss, (0, 1, 2))(q, k, v))
    for one, other in zip(ours, expected, strict=True):
        assert error(one, float64(other)) < 1e-5


@pytest.mark.parametrize("function", [selective_attention, stick_breaking_attention])
def test_documents_and_masks_are_for_plain_mlx(function):
    q, k, v = (mx.random.normal((1, 2, 9, 64)) for _ in range(3))
    with launching(), record() as ran:
        mx.eval(function(q, k, v, scale=0.3, segment_ids=mx.array([0] * 4 + [1] * 5)))
    assert ran == []
