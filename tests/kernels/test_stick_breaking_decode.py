"""Stick-breaking's kernel for one query, as Metal text on the processor, against NumPy float64."""

import metal_host
import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering, every
from methods import error, float64
from place import BACKEND, FLOORS, ask_ahead, host_only, launching
from test_selective_kernel import names

from mlx_selective import stick_breaking_attention
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels import outputs_start_as, record
from mlx_selective.kernels import stick_breaking_decode as module

KERNELS = ["stick_breaking_decode", "stick_breaking_decode_split", "stick_breaking_combine"]
SHAPES = {
    "dtype": list(FLOORS),
    "D": [64, 80, 96, 128],
    "N": [1, 2, 33, 127, 512, 513, 1100],
    "heads": [(1, 1), (4, 1), (6, 2), (3, 3)],
    "B": [1, 2],
    "own": [False, True],
    "lower": [0, 8],  # what is taken from the logits
}


def definition(q, k, v, scale, own):
    """Output (B, H, 1, D) and remainder (B, H, 1) of the last query, NumPy float64."""
    seen = k.shape[2] - (not own)
    k, v = (oracle.repeat_heads(kv[:, :, :seen], q.shape[1]) for kv in (k, v))
    z = scale * np.einsum("bhd,bhjd->bhj", q[:, :, 0], k)
    broken = np.logaddexp(0, z)
    from_here = np.cumsum(broken[..., ::-1], -1)[..., ::-1]
    out = np.einsum("bhj,bhjd->bhd", np.exp(z - from_here), v)[:, :, None]
    return out, np.exp(-broken.sum(-1))[..., None]


def problem(dtype, D, N, heads, B, lower=0, seed=0):
    """q, k, v, keys and values part of a larger array."""
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(B, heads[0], 1, D), (B, heads[1], N + 7, D), (B, heads[1], N + 7, D)]
    q, k, v = (mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True))
    q = mx.concatenate([mx.ones_like(q[..., :1]), q[..., 1:]], -1)
    k = mx.concatenate([mx.full(k[..., :1].shape, -lower * D**0.5), k[..., 1:]], -1)
    return [array.astype(dtype) for array in (q, k[:, :, :N], v[:, :, :N])]


def by_kernel(q, k, v, scale, own=False):
    """They begin as NaN, so that what is not written shows."""
    with launching(), outputs_start_as(float("nan")), record() as ran:
        results = stick_breaking_attention(q, k, v, scale=scale, attend_current=own)
        mx.eval(results)
    assert {one.backend for one in ran} == {BACKEND}
    assert {one.kernel for one in ran} <= set(KERNELS)
    return results


def check_shape(seed, dtype, D, own, **case):
    # the error of a few weights is a matter of luck
    draws = -(-384 // (case["B"] * case["heads"][0] * min(8, case["N"])))
    found = []
    for i in range(draws):
        arrays = problem(dtype, D, **case, seed=100 * seed + i)
        truth = definition(*map(float64, arrays), D**-0.5, own)
        plain = plain_stick_breaking(*arrays, scale=D**-0.5, attend_current=own)
        found.append((by_kernel(*arrays, D**-0.5, own), plain, truth))
    (out, left), (plain, plain_left), (truth, true_left) = (
        [np.concatenate([np.array(f[side][i], np.float64) for f in found]) for i in range(2)]
        if side == 2
        else [np.concatenate([float64(f[side][i]) for f in found]) for i in range(2)]
        for side in range(3)
    )
    if truth.any():
        assert error(out, truth) <= 2 * error(plain, truth) + FLOORS[dtype]
    else:
        assert not out.any()
    worst = np.abs(plain_left - true_left).max()
    assert np.abs(left - true_left).max() <= 2 * worst + 2e-7 * true_left.max() + 2**-29


CASES = covering(SHAPES)


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_shapes(seed, case):
    check_shape(seed, **case)


AHEAD = covering(SHAPES | {"dtype": [mx.float16, mx.bfloat16], "like": ["metal", "cuda"]})


@host_only
@pytest.mark.parametrize("seed, case", list(enumerate(AHEAD)), ids=map(names, AHEAD))
def test_shapes_with_keys_asked_for_ahead(seed, case, monkeypatch):
    """As on CUDA, and with the splits of either backend: the text is Metal's all the same."""
    ask_ahead(module, monkeypatch, case["like"])
    check_shape(seed, **{name: value for name, value in case.items() if name != "like"})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("D", SHAPES["D"])
def test_every_shape(D, dtype):
    for seed, case in enumerate(every(SHAPES | {"D": [D], "dtype": [dtype]})):
        check_shape(seed, **case)


def test_the_definition_is_the_oracle():
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, 9, 16)) for heads in (4, 2, 2))
    for own in (False, True):
        out, left = definition(q[:, :, -1:], k, v, 0.4, own)
        truth = oracle.stick_breaking(q, k, v, 0.4, own)
        assert np.allclose(out, truth[0][:, :, -1:]) and np.allclose(left, truth[1][:, :, -1:])


@pytest.mark.parametrize("logit", [-1e4, -30, 25, 200, 1e4])
def test_logits_that_are_all_equal(logit):
    """Nothing is taken, or all by the newest key; no number overflows."""
    q, k = mx.zeros((1, 2, 1, 64)), mx.zeros((1, 2, 600, 64))
    q[..., 0], k[..., 0] = 1, logit
    v = mx.random.normal((1, 2, 600, 64))
    out, left = by_kernel(q, k, v, 1.0)
    truth, true_left = definition(*map(float64, (q, k, v)), 1.0, False)
    assert np.abs(float64(out) - truth).max() <= 1e-6 * max(1e-3, np.abs(truth).max())
    assert np.abs(float64(left) - true_left).max() <= 2**-29


@host_only
def test_a_spent_stick_is_not_read_on():
    """The newest keys take all: of each simdgroup's share the newest keys alone are read."""
    q, k = mx.full((1, 1, 1, 64), 2.0, mx.float16), mx.ones((1, 1, 512, 64), mx.float16)
    v = mx.random.normal((1, 1, 512, 64)).astype(mx.float16)
    mx.eval(q, k, v)
    with metal_host.recording() as reports:
        out, left = by_kernel(q, k, v, 1.0, own=True)
    (report,) = reports
    assert report.device_read["k"] == report.device_read["v"] == 8 * 32 * 64 * 2
    assert error(out, float64(v[:, :, -1:])) < 1e-3 and left.item() <= 2**-29


def test_weights_and_remainder_sum_to_one():
    q, k, _ = problem(mx.float32, 64, 1100, (4, 2), 2, lower=7)
    out, left = by_kernel(q, k, mx.ones(k.shape), 0.125)
    assert mx.abs(out + left[..., None] - 1).max().item() < 1e-6


def test_gradients_are_those_of_the_definition(monkeypatch):
    q, k, v = problem(mx.float32, 64, 20, (4, 2), 1)

    def loss(q, k, v):
        out, left = stick_breaking_attention(q, k, v, scale=0.3)
        return (out**2).sum() + (left * mx.arange(4)[None, :, None]).sum()

    with launching(), record() as ran:
        ours = mx.grad(loss, (0, 1, 2))(q, k, v)
        mx.eval(ours)
    assert {one.backend for one in ran} == {BACKEND}
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    for one, other in zip(ours, mx.grad(loss, (0, 1, 2))(q, k, v), strict=True):
        assert error(one, float64(other)) < 1e-5
