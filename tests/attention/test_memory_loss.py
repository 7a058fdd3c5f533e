"""Selective attention in training: the memory loss, the gain of F, keys that are dropped."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from methods import error, float64, random_qkv
from test_gradients import SCALE, check
from tiny import grafted, tokens

from mlx_selective import selective_attention
from mlx_selective.attention.selective.memory_loss import (
    TrainingPass,
    current_pass,
    keys_needed,
    memory_loss,
    training_pass,
)
from mlx_selective.errors import UserError


def true_loss(layers, lengths):
    """The formula, row by row and layer by layer."""
    total = 0
    for b, length in enumerate(lengths):
        most = [one[b, :length].max() if length else 0 for one in layers]
        total += sum(most) / (len(layers) * max(length, 1))
    return total / len(lengths)


def test_the_formula():
    rng = np.random.default_rng(0)
    layers = [rng.uniform(0, 9, (3, 7)) for _ in range(4)]
    lengths = [7, 3, 0]
    ours = memory_loss([mx.array(one) for one in layers], mx.array(lengths))
    assert ours.item() == pytest.approx(true_loss(layers, lengths), rel=1e-6)
    each = keys_needed([mx.array(one) for one in layers], mx.array(lengths))
    expected = [true_loss([one], lengths) for one in layers]
    assert np.allclose(each, expected, rtol=1e-6)


@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
@pytest.mark.parametrize("lengths", [[8, 8], [8, 5], [3, 1]], ids=str)
def test_gradients_of_the_memory_loss(block_size, lengths):
    """Padding is behind the tokens: it needs no keys, and no key is needed for it."""
    arrays, truths = random_qkv(1, B=2, H=2, Hkv=1, T=8, D=4)

    def run(q, k, v):
        out, needed = selective_attention(
            q, k, v, scale=SCALE, return_remaining=True, block_size=block_size
        )
        return memory_loss([needed, needed / 2], mx.array(lengths))[None], out

    def truth(q, k, v):
        out, _, needed = oracle.selective_results(q, k, v, SCALE)
        return np.array([true_loss([needed, needed / 2], lengths)]), out

    check(run, truth, arrays, truths)


@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
@pytest.mark.parametrize("gain", [0, 0.3, 1.0])
def test_the_gain(gain, block_size):
    arrays, truths = random_qkv(2, B=1, H=2, Hkv=1, T=8, D=4)

    def run(q, k, v):
        options = {"return_F": True, "return_remaining": True, "block_size": block_size}
        return selective_attention(q, k, v, scale=SCALE, gain=mx.array(gain), **options)

    def truth(q, k, v):
        return oracle.selective_results(q, k, v, SCALE, gain=gain)

    check(run, truth, arrays, truths)
    plain = selective_attention(*arrays, scale=SCALE)
    with_gain = selective_attention(*arrays, scale=SCALE, gain=gain)
    if gain == 1:
        assert mx.array_equal(plain, with_gain)
    if gain == 0:
        softmax = mx.fast.scaled_dot_product_attention(*arrays, scale=SCALE, mask="causal")
        assert mx.allclose(with_gain, softmax, atol=1e-6)


@pytest.mark.parametrize("keep", [2, 3, 5, 40])
@pytest.mark.parametrize("block_size", [1, 3, 4, 64])
def test_keys_that_are_dropped(keep, block_size):
    """As a cache with that budget that is handed the same blocks."""
    arrays, truths = random_qkv(3, B=2, H=4, Hkv=2, T=13, D=8)
    chunks = [min(block_size, 13 - start) for start in range(0, 13, block_size)]
    expected, kept, held_F = oracle.selective_pruned(*truths, SCALE, keep, chunks)
    out, F = selective_attention(
        *arrays, scale=SCALE, return_F=True, keep=mx.array(keep), block_size=block_size
    )
    assert error(out, expected) < 1e-6
    for row in range(2):
        stays = np.flatnonzero(np.isfinite(np.array(F[row])))
        assert stays.tolist() == list(kept[row])
        assert np.allclose(float64(F[row])[stays], held_F[row], atol=1e-5)


@pytest.mark.parametrize("block_size", [2, 4])
def test_gradients_around_dropped_keys(block_size):
    arrays, truths = random_qkv(4, B=1, H=2, Hkv=1, T=9, D=4)
    chunks = [min(block_size, 9 - start) for start in range(0, 9, block_size)]

    def run(q, k, v):
        return (selective_attention(q, k, v, scale=SCALE, keep=3, block_size=block_size),)

    check(
        run, lambda q, k, v: oracle.selective_pruned(q, k, v, SCALE, 3, chunks)[:1], arrays, truths
    )


# In a model ---------------------------------------------------------------------------------------


def test_a_pass_collects_what_each_layer_needs():
    model = grafted("llama", {"kind": "selective"})
    ids = tokens(2, 9)
    with training_pass(TrainingPass()) as own:
        logits = model(ids)
    assert current_pass() is None
    assert [one.shape for one in own.remaining] == [(2, 9)] * len(model.layers)
    assert mx.array_equal(logits, model(ids))
    # the first query needs its own key, the second both
    assert all(mx.array_equal(one[:, :2], mx.array([[1, 2], [1, 2]])) for one in own.remaining)


def test_a_pass_without_selection_is_the_softmax_model():
    model = grafted("llama", {"kind": "selective"})
    twin = grafted("llama", {"kind": "softmax"})
    twin.update(model.parameters())
    with training_pass(TrainingPass(gain=mx.array(0.0))) as own:
        logits = model(tokens(2, 9))
    assert mx.allclose(logits, twin(tokens(2, 9)), atol=1e-5)
    assert all(mx.array_equal(one[0], mx.arange(1, 10)) for one in own.remaining)


@pytest.mark.parametrize("gain", [0.0, 0.4])
def test_a_gain_in_the_config_holds_with_a_cache_too(gain):
    from mlx_lm.models.cache import make_prompt_cache

    model = grafted("llama", {"kind": "selective", "gain": gain})
    ids = tokens(2, 12)
    with training_pass(TrainingPass(gain=mx.array(gain))):
        expected = model(ids)
    assert mx.allclose(model(ids), expected, atol=1e-5)
    cache = make_prompt_cache(model)
    parts = [model(ids[:, part], cache=cache) for part in (slice(0, 7), slice(7, 8), slice(8, 12))]
    assert mx.allclose(mx.concatenate(parts, axis=1), expected, atol=1e-4)
    assert model.attention.to_dict() == {"kind": "selective", "budget": None, "gain": gain}


def test_a_gain_of_one_is_not_in_the_config():
    model = grafted("llama", {"kind": "selective", "gain": 1.0})
    assert model.attention.to_dict() == {"kind": "selective", "budget": None}


@pytest.mark.parametrize("gain", [-0.1, 1.5, "1", None, True, float("nan")])
def test_gains_out_of_range(gain):
    with pytest.raises(UserError, match="attention.gain must be a number from 0 to 1"):
        grafted("llama", {"kind": "selective", "gain": gain})
