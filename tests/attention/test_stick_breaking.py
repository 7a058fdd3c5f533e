"""Stick-breaking: shares, remainder, and several queries against a prefix."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import error, float64, random_qkv

from mlx_selective import stick_breaking_attention

few_examples = settings(max_examples=20, deadline=None)
both_forms = pytest.mark.parametrize("attend_current", [False, True])


@both_forms
@few_examples
@given(seed=st.integers(0, 999), T=st.integers(1, 40), scale=st.sampled_from([0.1, 1.0, 8.0]))
def test_weights_and_remainder_sum_to_one(attend_current, seed, T, scale):
    (q, k, v), _ = random_qkv(seed, T=T)
    ones = mx.ones((*v.shape[:3], 1))
    shares, remainder = stick_breaking_attention(
        q, k, ones, scale=scale, attend_current=attend_current
    )
    assert remainder.dtype == mx.float32
    assert mx.all(remainder >= 0).item()
    assert np.allclose(np.array(shares[..., 0] + remainder), 1, atol=2e-6)


@both_forms
def test_remainder_agrees_with_the_oracle(attend_current):
    (q, k, v), truth = random_qkv(3, T=33)
    _, remainder = stick_breaking_attention(q, k, v, scale=0.2, attend_current=attend_current)
    _, expected = oracle.stick_breaking(*truth, 0.2, attend_current)
    assert error(remainder, expected) < 2e-6


def test_three_tokens_by_hand():
    """Logits 0: every share is a half of what is left, nearest first."""
    q = k = mx.zeros((1, 1, 3, 1))
    output, remainder = stick_breaking_attention(q, k, mx.eye(3)[None, None], scale=1.0)
    assert np.allclose(np.array(output)[0, 0], [[0, 0, 0], [0.5, 0, 0], [0.25, 0.5, 0]])
    assert np.allclose(np.array(remainder)[0, 0], [1, 0.5, 0.25])


@both_forms
@few_examples
@given(seed=st.integers(0, 999), T=st.integers(2, 30), data=st.data())
def test_queries_on_a_prefix_are_the_whole(attend_current, seed, T, data):
    (q, k, v), _ = random_qkv(seed, T=T)
    whole, rest = stick_breaking_attention(q, k, v, scale=0.4, attend_current=attend_current)
    start = data.draw(st.integers(1, T - 1))
    end = data.draw(st.integers(start + 1, T))
    output, remainder = stick_breaking_attention(
        q[:, :, start:end],
        k[:, :, :end],
        v[:, :, :end],
        scale=0.4,
        attend_current=attend_current,
    )
    assert error(output, float64(whole[:, :, start:end])) < 2e-6
    assert np.allclose(np.array(remainder), np.array(rest[:, :, start:end]), rtol=1e-5, atol=1e-6)


def test_saturated_logits_are_rightmost_hard_attention():
    (q, k, v), _ = random_qkv(1, H=1, Hkv=1, T=9)
    q = k = mx.ones_like(k)
    output, remainder = stick_breaking_attention(q, k, v, scale=100.0)
    assert np.allclose(np.array(output[:, :, 1:]), np.array(v[:, :, :-1]), atol=1e-6)
    assert np.allclose(np.array(remainder[:, :, 1:]), 0)


@both_forms
@pytest.mark.parametrize("block_size", [64, 3])
def test_masked_keys_break_nothing_off(attend_current, block_size):
    """Left padding by row: the rest is as if the pads were not there, remainder included."""
    (q, k, v), _ = random_qkv(5, B=2, T=9)
    pads = [0, 4]
    mask = (mx.arange(9)[None] >= mx.array(pads)[:, None])[:, None, None]
    options = {"scale": 0.4, "attend_current": attend_current, "block_size": block_size}
    both, rest = stick_breaking_attention(q, k, v, mask=mask, **options)
    for row, n in enumerate(pads):
        one = slice(row, row + 1)
        alone, rest_alone = stick_breaking_attention(
            q[one, :, n:], k[one, :, n:], v[one, :, n:], **options
        )
        assert np.allclose(np.array(both[one, :, n:]), np.array(alone), atol=1e-6)
        assert np.allclose(np.array(rest[one, :, n:]), np.array(rest_alone), atol=1e-6)
        assert (both[one, :, :n] == 0).all()
        assert (rest[one, :, :n] == 1).all()
