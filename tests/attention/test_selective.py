"""Selective attention: F, its invariants, and what a cache passes in."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import error, float64, random_qkv

from mlx_selective import selective_attention

few_examples = settings(max_examples=20, deadline=None)


def F_rows(q, k, v, scale):
    """F as each query leaves it, (B, T, T), fed one query at a time as a cache does."""
    B, _, T, _ = q.shape
    rows, F = [], mx.zeros((B, 0))
    for i in range(T):
        F = mx.pad(F, ((0, 0), (0, 1)))
        end = i + 1
        _, F = selective_attention(
            q[:, :, i:end], k[:, :, :end], v[:, :, :end], scale=scale, F=F, return_F=True
        )
        rows.append(np.pad(np.array(F), ((0, 0), (0, T - end))))
    return np.stack(rows, axis=1)


@few_examples
@given(seed=st.integers(0, 999), T=st.integers(1, 12))
def test_F_never_falls_and_spares_the_first_and_itself(seed, T):
    (q, k, v), (q64, k64, v64) = random_qkv(seed, T=T)
    rows = F_rows(q, k, v, 0.5)
    assert (np.diff(rows, axis=1) >= 0).all()
    assert (rows[:, :, 0] == 0).all()
    assert (rows[:, range(T), range(T)] == 0).all()
    _, F = oracle.selective(q64, k64, v64, 0.5)
    # the oracle's row i + 1 is what query i leaves
    assert np.allclose(rows[:, :-1], F[:, 1:], rtol=1e-5, atol=1e-6)


def test_two_tokens_by_hand():
    """Query 2 selects key 1 with logit 3: query 3 gives it a weight e^-3 smaller."""
    k = mx.array([[0.0], [3.0], [0.0], [0.0]])[None, None]
    q = mx.array([[0.0], [0.0], [1.0], [0.0]])[None, None]
    v = mx.eye(4)[None, None]
    output, F = selective_attention(q, k, v, scale=1.0, return_F=True)
    assert np.allclose(np.array(F), [[0, 3, 0, 0]])
    weight = np.exp(-3.0)
    expected = np.array([1, weight, 1, 1]) / (3 + weight)
    assert np.allclose(np.array(output)[0, 0, 3], expected, atol=1e-7)
    # the query that selects still sees the key undiminished
    assert np.allclose(
        np.array(output)[0, 0, 2], oracle.softmax(np.array([0, 3.0, 0]))[:3].tolist() + [0]
    )


def test_nothing_selected_is_plain_attention():
    (q, k, v), _ = random_qkv(1, T=33)
    # all of head 0's logits are negative: its queries are minus a positive mix of its keys
    k = mx.abs(k)
    q = mx.concatenate([-mx.abs(q[:, :1]), q[:, 1:]], axis=1)
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")
    assert error(selective_attention(q, k, v, scale=0.3), float64(plain)) < 1e-6


@few_examples
@given(seed=st.integers(0, 999), T=st.integers(2, 40), data=st.data())
def test_chunks_are_the_whole(seed, T, data):
    (q, k, v), _ = random_qkv(seed, T=T)
    whole, F_whole = selective_attention(q, k, v, scale=0.3, return_F=True)
    borders = sorted(data.draw(st.sets(st.integers(1, T - 1), max_size=5))) + [T]
    outputs, F, start = [], mx.zeros((2, 0)), 0
    for end in borders:
        F = mx.concatenate([F, mx.zeros((2, end - start))], axis=1)
        output, F = selective_attention(
            q[:, :, start:end], k[:, :, :end], v[:, :, :end], scale=0.3, F=F, return_F=True
        )
        outputs.append(output)
        start = end
    assert error(mx.concatenate(outputs, axis=2), float64(whole)) < 2e-6
    assert np.allclose(np.array(F), np.array(F_whole), rtol=1e-5, atol=1e-5)


@few_examples
@given(seed=st.integers(0, 999), n=st.integers(1, 20), empty=st.integers(0, 4))
def test_order_of_slots_and_empty_slots_do_not_matter(seed, n, empty):
    """What a pruned cache holds: keys anywhere, some slots empty with rubbish in them."""
    rng = np.random.default_rng(seed)
    (q, k, v), _ = random_qkv(seed, B=1, T=n + 1)
    F = mx.array(rng.uniform(0, 2, (1, n + 1)).astype(np.float32))
    F[:, -1] = 0
    q = q[:, :, -1:]
    plain, F_plain = selective_attention(q, k, v, scale=0.3, F=F, return_F=True)
    order = rng.permutation(n + 1 + empty)
    rubbish = [mx.full((1, 2, empty, 16), 77.0)]
    slots = mx.array(order)
    positions = mx.array(np.r_[np.arange(n + 1), np.full(empty, -1)].astype(np.int32))
    output, F_slots = selective_attention(
        q,
        mx.concatenate([k, *rubbish], axis=2)[:, :, slots],
        mx.concatenate([v, *rubbish], axis=2)[:, :, slots],
        scale=0.3,
        query_positions=mx.array([n]),
        key_positions=positions[slots],
        F=mx.concatenate([F, mx.zeros((1, empty))], axis=1)[:, slots],
        return_F=True,
    )
    assert error(output, float64(plain)) < 2e-6
    back = np.array(F_slots)[:, np.argsort(order)][:, : n + 1]
    assert np.allclose(back, np.array(F_plain), rtol=1e-5, atol=1e-6)


def test_rows_may_stand_at_different_positions():
    """Each row has its own offset: the first token of one row is not that of another."""
    (q, k, v), _ = random_qkv(2, B=2, T=6)
    F = mx.array(np.random.default_rng(0).uniform(0, 1, (2, 6)).astype(np.float32))
    positions = mx.array([[0, 1, 2, 3, 4, 5], [4, 7, 9, 11, 20, 21]])
    both = selective_attention(q[:, :, -2:], k, v, scale=0.3, key_positions=positions, F=F)
    for row in range(2):
        one = slice(row, row + 1)
        alone = selective_attention(
            q[one, :, -2:],
            k[one],
            v[one],
            scale=0.3,
            query_positions=positions[row, -2:],
            key_positions=positions[row],
            F=F[one],
        )
        assert error(both[one], float64(alone)) < 1e-6


def test_F_stays_float32_over_long_sums():
    """2,048 additions of 0.4 in bfloat16 would stall far below their sum."""
    T = 2048
    k = mx.full((1, 1, T, 1), 0.4, mx.bfloat16)
    q = mx.ones((1, 1, T, 1), mx.bfloat16)
    _, F = selective_attention(q, k, k, scale=1.0, return_F=True)
    assert F.dtype == mx.float32
    assert abs(F[0, 1].item() - (T - 2) * k[0, 0, 0, 0].item()) < 0.05


def test_F_of_a_wrong_shape_is_told():
    (q, k, v), _ = random_qkv(0, T=5)
    with pytest.raises(ValueError, match=r"F must be \(2, 5\)"):
        selective_attention(q, k, v, scale=1.0, F=mx.zeros((2, 4)))


def test_left_padding_is_negative_positions():
    """Pads are seen by nobody and select nothing; the first real token is the protected one."""
    (q, k, v), _ = random_qkv(5, B=2, T=9)
    pads = mx.array([0, 4])
    positions = mx.arange(9)[None] - pads[:, None]
    both, F = selective_attention(q, k, v, scale=0.4, key_positions=positions, return_F=True)
    for row, n in enumerate([0, 4]):
        one = slice(row, row + 1)
        alone, F_alone = selective_attention(
            q[one, :, n:], k[one, :, n:], v[one, :, n:], scale=0.4, return_F=True
        )
        assert error(both[one, :, n:], float64(alone)) < 1e-6
        assert (both[one, :, :n] == 0).all()
        assert np.allclose(np.array(F)[one, n:], np.array(F_alone), atol=1e-6)
        assert (F[one, :n] == 0).all()


def test_padding_has_no_gradient():
    (q, k, v), _ = random_qkv(5, B=1, T=6)

    def loss(q, k, v):
        positions = mx.arange(6)[None] - 2
        out = selective_attention(q, k, v, scale=0.4, key_positions=positions)
        return (out**2).sum()

    for gradient in mx.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert mx.isfinite(gradient).all()
        assert (gradient[:, :, :2] == 0).all()
        assert (gradient[:, :, 2:] != 0).any()
