"""Kernels that mlx-lm ships as text agree with the same modules' plain operations."""

import importlib
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import metal_host
from metal_host import Fault
from metal_host.proof.mlx_kernels import FLOATS, assert_near, random
from metal_host.proof.numbers import float64
from metal_host.proof.versions import seen_in

SEEDS = range(4)


@pytest.fixture
def on_host(monkeypatch):
    """Makes a module's kernel run here: the kernel itself, or what makes it where Metal is."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)

    def patch(module, name, maker=None, **options):
        kernel = getattr(module, maker)(**options) if maker else getattr(module, name)
        monkeypatch.setattr(module, name, partial(metal_host.execute, kernel))

    return patch


def module(name: str):
    return pytest.importorskip(f"mlx_lm.{name}", reason="not in this version of mlx-lm")


def run(fn, *arrays, seeds=SEEDS):
    """The results; the same bits and counts whatever the order of threads."""
    results = []
    for seed in seeds:
        with metal_host.recording(seed=seed) as reports:
            out = fn(*arrays)
        assert reports and not any(sum(report.unwritten.values()) for report in reports)
        every = out if isinstance(out, (list, tuple)) else [out]
        results.append((reports, every))
        assert reports == results[0][0]
        pairs = zip(every, results[0][1], strict=True)
        assert all(mx.array_equal(a, b, equal_nan=True) for a, b in pairs)
    return out


def rotated(x: np.ndarray, positions: np.ndarray, traditional: bool) -> np.ndarray:
    """Pairs of neighbours turn, or of the two halves; base 10000."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * 10000.0 ** -(np.arange(half) / half)
    first, second = (x[..., ::2], x[..., 1::2]) if traditional else (x[..., :half], x[..., half:])
    cos, sin = np.cos(angles), np.sin(angles)
    turned = first * cos - second * sin, first * sin + second * cos
    return np.stack(turned, -1).reshape(x.shape) if traditional else np.concatenate(turned, -1)


def raised(*arrays):
    return [a.astype(mx.float32) for a in arrays]


# RMS norm and rotary embedding


@pytest.mark.parametrize("D", [64, 600])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_rms_norm(on_host, dtype, D):
    kernels = module("kernels.norm_add_norm")
    on_host(kernels, "_pre_norm_kernel")
    norm = nn.RMSNorm(D, eps=1e-5)
    norm.weight = random((D,), mx.float32, 1)
    stream = random((2, 3, D), mx.float32)
    out = run(lambda s: kernels.pre_norm(s, norm, dtype=dtype), stream)
    x = float64(stream)
    truth = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * float64(norm.weight)
    assert_near(out, mx.fast.rms_norm(stream, norm.weight, 1e-5).astype(dtype), truth)


@pytest.mark.parametrize("scaled", [False, True])
def test_norm_add_norm(on_host, scaled):
    kernels = module("kernels.norm_add_norm")
    on_host(kernels, "_norm_add_norm_kernel")
    D, dtype = 600, mx.bfloat16
    norm = nn.RMSNorm(D, eps=1e-5)
    branch, stream = random((2, 3, D), dtype), random((2, 3, D), mx.float32, 1)
    alpha, beta, weight = (mx.random.uniform(0.5, 1, (D,), key=mx.random.key(n)) for n in range(3))
    given = {"alpha": alpha, "beta": beta, "post_eps": 1e-6, "next_norm": norm}
    given["post_weight"] = weight.astype(dtype) if scaled else None
    new, normed = run(lambda b, s: kernels.norm_add_norm(b, s, **given), branch, stream)
    inner = given["post_weight"] * branch if scaled else branch
    added = alpha * stream + beta * mx.fast.rms_norm(inner, None, 1e-6).astype(mx.float32)
    assert mx.allclose(new, added, atol=0.02)  # one rounding to bfloat16 may differ
    assert_near(normed, norm(new).astype(dtype), norm(new))


@pytest.mark.parametrize("dtype", FLOATS)
def test_qk_norm_rope(on_host, dtype):
    kernels = module("kernels.qk_norm_rope")
    on_host(kernels, "_qk_norm_rope_kernel")
    heads = {"n_heads": 3, "n_kv_heads": 2, "head_dim": 64}
    settings = {"eps": 1e-5, "query_scale": 0.5, "rope_base": 10000.0}
    x, offset = random((2, 7, 2 * 5 * 64), dtype), mx.array([3, 200])
    q, k = run(lambda x, o: kernels.qk_norm_rope(x, **heads, **settings, offset=o), x, offset)

    def plain(x):
        normed = mx.fast.rms_norm(x[..., : 5 * 64].reshape(2, 7, 5, 64), None, 1e-5)
        parts = 0.5 * normed[:, :, :3], normed[:, :, 3:]
        turned = [
            mx.fast.rope(y.swapaxes(1, 2), 64, traditional=True, base=1e4, scale=1, offset=offset)
            for y in parts
        ]
        return [y.swapaxes(1, 2) for y in turned]

    normed = float64(x)[..., : 5 * 64].reshape(2, 7, 5, 64)
    normed /= np.sqrt((normed**2).mean(-1, keepdims=True) + 1e-5)
    positions = np.array([3, 200])[:, None, None] + np.arange(7)[:, None]
    truth = rotated(normed, positions, traditional=True)
    assert_near(q, plain(x)[0], 0.5 * truth[:, :, :3])
    assert_near(k, plain(x)[1], truth[:, :, 3:])


def test_rms_norm_sigmoid_gate(on_host):
    """Arrays that are not contiguous are taken as they are."""
    kernels = module("kernels.rms_norm_sigmoid_gate")
    on_host(kernels, "_norm_gate_kernel")
    x, gate = random((2, 5, 3, 64), mx.float16).swapaxes(1, 2), random((2, 5, 192), mx.float16, 1)
    out = run(lambda x, g: kernels.rms_norm_sigmoid_gate(x, g, eps=1e-5), x, gate)

    def plain(x, gate):
        normed = mx.fast.rms_norm(x, None, 1e-5).swapaxes(1, 2).flatten(2)
        return normed * mx.sigmoid(gate)

    assert_near(out, plain(x, gate), plain(*raised(x, gate)))


def test_expert_routing(on_host):
    kernels = module("kernels.expert_routing")
    on_host(kernels, "_routing_kernel")
    logits, bias = random((6, 40), mx.float32), 0.1 * random((40,), mx.float32, 1)
    settings = {"top_k": 4, "multiplier": 1.5, "score_eps": 1e-6, "route_scale": 2.0}
    indices, weights = run(lambda x, b: kernels.expert_routing(x, b, **settings), logits, bias)
    scores = mx.sigmoid(1.5 * logits)
    order = mx.argsort(-(scores + bias), -1)[:, :4]
    assert mx.array_equal(indices, order)
    chosen = mx.take_along_axis(scores, order, -1)
    assert mx.allclose(weights, 2 * chosen / (chosen.sum(-1, keepdims=True) + 1e-6))


def test_post_expert_norm_combine(on_host):
    kernels = module("kernels.post_expert_norm_combine")
    on_host(kernels, "_expert_combine_kernel")
    experts, weights = (
        random((5, 3, 300), mx.float32),
        mx.softmax(random((5, 3), mx.float32, 1), -1),
    )
    scale = random((300,), mx.float32, 2)

    def kernel(e, w):
        return kernels.post_expert_norm_combine(e, w, norm_weight=scale, eps=1e-5)

    plain = (weights[..., None] * mx.fast.rms_norm(scale * experts, None, 1e-5)).sum(-2)
    assert mx.allclose(run(kernel, experts, weights), plain, rtol=1e-5, atol=1e-6)


# Recurrences


def recurrence(dtype, vectorized=False, B=1, T=5, Hk=2, Hv=4, Dk=64, Dv=8):
    q, k, v = (
        random(shape, dtype, n) / Dk**0.5
        for n, shape in enumerate([(B, T, Hk, Dk), (B, T, Hk, Dk), (B, T, Hv, Dv)])
    )
    gate = (B, T, Hv, Dk) if vectorized else (B, T, Hv)
    g = mx.random.uniform(0.5, 1, gate, key=mx.random.key(7))
    beta = mx.sigmoid(random((B, T, Hv), dtype, 8))
    return q, k, v, g, beta, random((B, Hv, Dv, Dk), mx.float32, 9)


@pytest.mark.parametrize(
    ("dtype", "vectorized", "masked"),
    [(mx.float32, False, False), (mx.bfloat16, False, True), (mx.float32, True, True)],
)
def test_gated_delta(on_host, dtype, vectorized, masked):
    gated = module("models.gated_delta")
    name = "_gated_delta_kernel" + "_vec" * vectorized + "_masked" * masked
    on_host(gated, name, "_make_gated_delta_kernel", has_mask=masked, vectorized=vectorized)
    arrays = recurrence(dtype, vectorized)
    mask = [mx.array([[True] * 5])] if masked else []
    y, state = run(lambda *a: gated.gated_delta_kernel(*a), *arrays, *mask)
    own, own_state = gated.gated_delta_ops(*arrays, *mask)
    truth, true_state = gated.gated_delta_ops(*raised(*arrays), *mask)
    assert_near(y, own, truth)
    assert_near(state, own_state.astype(state.dtype), true_state)


@seen_in("mlx-lm", "0.32.2")
def test_a_masked_step_is_written_by_every_lane(on_host):
    """All lanes of mlx-lm's kernel write the same nought: a race that no result shows."""
    gated = module("models.gated_delta")
    on_host(gated, "_gated_delta_kernel_masked", "_make_gated_delta_kernel", has_mask=True)
    mask = mx.array([[True, True, False, True, True]])
    with pytest.raises(Fault, match="device buffer `y`") as caught:
        gated.gated_delta_kernel(*recurrence(mx.float32), mask)
    assert caught.value.kind == "race"
    assert caught.value.thread // 32 == caught.value.other_thread // 32


def test_gated_delta_packed(on_host):
    """Its reduction is written out so that it has the bits of another kernel's."""
    gated = module("models.gated_delta")
    if not hasattr(gated, "_make_gated_delta_packed_kernel"):
        pytest.skip("not in this version of mlx-lm")
    on_host(gated, "_gated_delta_kernel_packed", "_make_gated_delta_packed_kernel")
    on_host(gated, "_gated_delta_kernel_xtree", "_make_gated_delta_kernel_xtree")
    arrays = recurrence(mx.float32, Dk=128)
    packed = run(lambda *a: gated.gated_delta_kernel(*a), *arrays, seeds=[1])
    tree = run(lambda *a: gated.gated_delta_kernel_xtree(*a), *arrays, seeds=[1])
    assert all(mx.array_equal(a, b) for a, b in zip(packed, tree, strict=True))


def test_state_space_model(on_host):
    ssm = module("models.ssm")
    on_host(ssm, "_ssm_kernel", "make_ssm_kernel")
    x, B, C = (
        random((2, 1, 4, 8), mx.float32),
        *(random((2, 1, 2, 64), mx.float32, n) for n in (1, 2)),
    )
    A, D, dt_bias = (random((4,), mx.float32, n) for n in (3, 4, 5))
    dt, state = random((2, 1, 4), mx.float32, 6), random((2, 4, 8, 64), mx.float32, 7)
    given = (x, A, B, C, D, dt, dt_bias, state, (0.001, 100.0))
    y, after = run(lambda: ssm.ssm_update_kernel(*given))
    plain, plain_after = ssm.ssm_attn(*given)
    assert mx.allclose(y, plain, rtol=1e-4, atol=1e-5)
    assert mx.allclose(after, plain_after, rtol=1e-4, atol=1e-5)


def test_rwkv7(on_host):
    rwkv7 = module("models.rwkv7")
    on_host(rwkv7, "_wkv7_kernel", "_make_wkv7_kernel")
    given = [random((1, 4, 2, 32), mx.float32, n) / 4 for n in range(6)]
    state = random((1, 2, 32, 32), mx.float32, 7)
    y, after = run(lambda *a: rwkv7.wkv7_kernel(*a), *given, state)
    steps = []
    for t in range(4):
        step, state = rwkv7._wkv7_step_ops(*(a[:, t] for a in given), state)
        steps.append(step.squeeze(-1))
    assert mx.allclose(y, mx.stack(steps, 1), rtol=1e-4, atol=1e-5)
    assert mx.allclose(after, state, rtol=1e-4, atol=1e-5)


# Others


def test_bitlinear(on_host):
    layers = module("models.bitlinear_layers")
    on_host(layers, "_bitlinear_kernel")
    layer = layers.BitLinear(64, 8, bias=False)
    x = random((2, 3, 64), mx.float32)
    packed = mx.random.randint(0, 256, (2, 64), key=mx.random.key(1)).astype(mx.uint8)
    packed = packed & 0xAA  # each weight is -1 or 1
    out = run(layer.execute_matmul_kernel, x, packed)
    weights = mx.concatenate([(packed >> 2 * n & 3).astype(mx.float32) - 1 for n in range(4)])
    assert mx.allclose(out, x @ weights.T, rtol=1e-4, atol=1e-5)


def test_attention_over_residuals(on_host):
    kimi = importlib.reload(module("models.kimi_k3"))  # its kernel is made where it is imported
    on_host(kimi, "_attn_res_kernel")
    raw, partial_sum = random((3, 2, 5, 64), mx.bfloat16), random((2, 5, 64), mx.bfloat16, 1)
    blocks = kimi.ResidualBlocks(1e-5)
    for one in raw:
        blocks.append(one)
    w = random((64,), mx.float32, 2)
    out = run(lambda: attention_over_residuals(kimi, blocks, partial_sum, w))
    combined = [blocks.raw, blocks.inv_rms, partial_sum, w]
    own = kimi._attn_res_combine(*combined, 1e-5)
    assert_near(out, own, kimi._attn_res_combine(*raised(*combined), 1e-5))


def attention_over_residuals(kimi, blocks, partial_sum, w):
    """As _attn_res_mix does, which asks whether the default device is a GPU."""
    return kimi._attn_res_kernel(
        inputs=[blocks.raw, blocks.inv_rms, partial_sum, w, mx.array([1e-5]), 10],
        template=[("InT", partial_sum.dtype), ("K", 3), ("D", 64), ("THREADS", 128)],
        grid=(128, 10, 1),
        threadgroup=(128, 1, 1),
        output_shapes=[partial_sum.shape],
        output_dtypes=[partial_sum.dtype],
    )[0]


@seen_in("mlx-lm", "0.32.2")
def test_a_race_in_the_divergence_of_kullback_and_leibler(on_host, monkeypatch):
    """A mistake of mlx-lm's: sums are written where others may still read the maxima there.

    No test of results finds it: they are right in the orders that come up.
    """
    losses = module("tuner.losses")
    q, p = (random((1, 5000), mx.float32, seed) - 20 for seed in (0, 1))
    truth = losses.kl_div_loss(q, p)
    monkeypatch.setattr(losses, "can_run_metal", lambda: True)
    on_host(losses, "_kl_forward_kernel", "_make_kl_forward_kernel")
    for seed in SEEDS:
        with metal_host.recording(seed=seed):
            with pytest.raises(Fault, match="threadgroup array `shared`") as caught:
                losses._kl_div_loss(q, p)
        assert caught.value.kind == "race"
    with metal_host.recording(trace=False):
        assert mx.allclose(losses._kl_div_loss(q, p), truth, rtol=1e-4)
