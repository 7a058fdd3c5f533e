"""SSA: the temperatures, and their place in a layer."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from methods import error, float64, random_qkv

from mlx_selective.attention.ssa import (
    SSA,
    Temperature,
    apply_temperature,
    position_temperature,
    released_position_temperature,
    ssa_attention,
    token_temperature,
)


def test_paper_form_agrees_with_the_oracle():
    rng = np.random.default_rng(0)
    x, weight, alpha = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, 8), (4, 8), 4))
    count = mx.arange(6, 15)  # positions 5 .. 14, as after five cached tokens
    tau = position_temperature(count, mx.array(alpha)) + token_temperature(
        mx.array(x), mx.array(weight)
    )
    expected = oracle.ssa_temperature(
        x.astype(np.float64), weight.astype(np.float64), alpha.astype(np.float64), np.arange(5, 14)
    )
    assert error(tau, expected) < 1e-6


@pytest.mark.parametrize("beta, coefficient", [(2.0, 0.000618), (1.5, 0.0113), (0.0, 0.368)])
def test_released_form(beta, coefficient):
    """1 + exp(-exp(beta)) ln n; the coefficients at the released inits are published."""
    tau = released_position_temperature(mx.array([1, 2, 100]), mx.array(beta))
    assert tau.shape == (1, 1, 3)
    assert np.exp(-np.exp(beta)) == pytest.approx(coefficient, rel=2e-3)
    expected = 1 + np.exp(-np.exp(beta)) * np.log([1, 2, 100])
    assert np.allclose(np.array(tau)[0, 0], expected, rtol=1e-6)


def test_first_token_has_no_position_part():
    alpha = mx.array([9.0, -9.0])
    assert np.allclose(np.array(position_temperature(mx.array([1]), alpha)), 1)


def test_temperature_commutes_with_rope_but_not_with_a_norm():
    (q, _, _), _ = random_qkv(0, T=5)
    tau = mx.random.uniform(0.5, 2, q.shape[:3])
    rope = lambda x: mx.fast.rope(x, 16, traditional=False, base=1e4, scale=1.0, offset=3)  # noqa: E731
    before, after = rope(apply_temperature(q, tau)), apply_temperature(rope(q), tau)
    assert error(before, float64(after)) < 1e-6
    norm = lambda x: mx.fast.rms_norm(x, None, 1e-6)  # noqa: E731
    assert error(norm(apply_temperature(q, tau)), float64(apply_temperature(norm(q), tau))) > 0.1


def test_ones_are_plain_attention_to_the_bit():
    (q, k, v), _ = random_qkv(1, T=33)
    ones = mx.ones(q.shape[:3])
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")
    assert mx.array_equal(ssa_attention(q, k, v, ones, ones[:, :2], scale=0.3), plain)
    assert mx.array_equal(ssa_attention(q, k, v, None, None, scale=0.3), plain)


def test_temperatures_may_have_an_axis_for_the_head_size():
    (q, k, v), _ = random_qkv(1, T=9)
    tau_q, tau_v = mx.random.uniform(0.5, 2, q.shape[:3]), mx.random.uniform(0.5, 2, k.shape[:3])
    flat = ssa_attention(q, k, v, tau_q, tau_v, scale=0.3)
    assert mx.array_equal(
        ssa_attention(q, k, v, tau_q[..., None], tau_v[..., None], scale=0.3), flat
    )
    shared = ssa_attention(q, k, v, tau_q[:, :1], None, scale=0.3)
    repeated = mx.broadcast_to(tau_q[:, :1], tau_q.shape)
    assert mx.array_equal(ssa_attention(q, k, v, repeated, None, scale=0.3), shared)


@pytest.mark.parametrize("form", ["alpha", "beta"])
@pytest.mark.parametrize("token_aware", [True, False])
def test_fresh_temperatures_are_exactly_one(form, token_aware):
    fresh = Temperature(4, 8, SSA(token_aware=token_aware, position_form=form))
    tau = fresh(mx.random.normal((2, 7, 8)), mx.arange(1, 8) * 1000)
    assert mx.all(tau == 1).item()


def test_fresh_temperatures_can_be_trained():
    """Small as the gradient is, an optimiser that scales by it can move alpha."""
    fresh = Temperature(2, 8, SSA())
    gradient = mx.grad(lambda alpha: position_temperature(mx.array([100]), alpha).sum())
    assert mx.all(gradient(fresh.alpha) > 1e-9).item()


def test_count_may_differ_by_row():
    alpha = mx.array([0.3])
    both = position_temperature(mx.array([[1, 2], [8, 9]]), alpha)
    assert both.shape == (2, 1, 2)
    assert error(both[1:], float64(position_temperature(mx.array([8, 9]), alpha))) < 1e-6
