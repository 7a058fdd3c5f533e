"""SSA in mlx-lm's models: every setting with caches, padding, trimming and quantised keys."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from feeding import ROUNDING, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import error, float64
from mlx.utils import tree_flatten
from mlx_lm.models import gpt_neox
from mlx_lm.models.cache import (
    BatchKVCache,
    KVCache,
    QuantizedKVCache,
    trim_prompt_cache,
)
from mlx_lm.tuner.utils import linear_to_lora_layers
from ssa_settings import MAPS, PARTS, randomised
from tiny import CONFIGS, attention_of, grafted, randomise, stock, tokens

from mlx_selective import UserError, graft
from mlx_selective.attention import method_from_dict

all_maps = pytest.mark.parametrize("maps", MAPS, ids="-".join)
#: RoPE on whole heads and on a part of them, a norm before it, and no RoPE
families = pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "gpt2"])
shared_maps = pytest.mark.parametrize("token_map", ["weight_sharing", "feature_sharing"])


def ssa(maps=("linear", "alpha"), **fields):
    return {"kind": "ssa", "key": True, "token_map": maps[0], "position_map": maps[1], **fields}


def tempered(family, maps=("linear", "alpha"), seed=0, **config):
    """A tiny grafted model, all of whose layers have random temperatures far from 1."""
    model, rng = grafted(family, ssa(maps), **config), np.random.default_rng(seed)
    for _, linear in model.named_modules():
        if isinstance(linear, nn.Linear):  # logits as of a trained model: rounding stays rounding
            linear.weight = linear.weight * 2 * linear.weight.shape[1] ** -0.5
    for attention in map(attention_of, model.layers):
        for part in PARTS:
            randomised(attention[f"{part}_temperature"], rng)
    return model


# The layer against the oracle ---------------------------------------------------------------------


def projections(family, attention, x):
    """q, k and v (1, heads, T, D) before RoPE in float64, and the dimensions that RoPE turns."""

    def project(name):
        layer = attention[name]
        return x @ float64(layer.weight).T + (float64(layer.bias) if "bias" in layer else 0)

    def split(array, heads):
        return array.reshape(1, x.shape[1], heads, -1).swapaxes(1, 2)

    def norm(array, name):
        rms = np.sqrt((array**2).mean(-1, keepdims=True) + 1e-5)
        return array / rms * float64(attention[name].weight)

    if family == "gpt_neox":
        return *np.split(split(project("query_key_value"), 4), 3, axis=-1), 2
    if family == "gpt2":
        return *(split(part, 4) for part in np.split(project("c_attn"), 3, axis=-1)), 0
    q, k, v = (split(project(f"{n}_proj"), heads) for n, heads in (("q", 4), ("k", 2), ("v", 2)))
    if family == "qwen3":
        q, k = norm(q, "q_norm"), norm(k, "k_norm")
    return q, k, v, q.shape[-1]


@families
@all_maps
def test_a_layer_agrees_with_the_oracle(family, maps):
    """The features are the projections before RoPE and after norms; RoPE then changes nothing."""
    attention = attention_of(tempered(family, maps).layers[0])
    x = mx.random.normal((1, 9, 32), key=mx.random.key(3))
    q, k, v, rotated = projections(family, attention, float64(x))
    tau_q, tau_k, tau_v = (
        oracle.ssa_tau(
            float64(x),
            projected,
            np.arange(1, 10)[None],
            maps[0],
            **{
                name: float64(value)
                for name, value in tree_flatten(attention[f"{part}_temperature"].parameters())
            },
        )
        for part, projected in zip(PARTS, (q, k, v), strict=True)
    )
    if rotated:
        q, k = (oracle.rope(array, rotated, 10000.0) for array in (q, k))
    output = oracle.ssa(q, k * tau_k[..., None], v, tau_q, tau_v, q.shape[-1] ** -0.5)
    output = output.swapaxes(1, 2).reshape(1, 9, -1)
    last = next(attention[n] for n in ("o_proj", "dense", "c_proj") if n in attention)
    output = output @ float64(last.weight).T + (float64(last.bias) if "bias" in last else 0)
    assert error(attention(x), output) < 1e-5


# Caches -------------------------------------------------------------------------------------------


@families
@all_maps
@settings(max_examples=2, deadline=None)
@given(length=st.sampled_from([1, 7, 33]), data=st.data())
def test_cached_and_chunked_are_the_whole(family, maps, length, data):
    model, ids = tempered(family, maps), tokens(2, length)
    borders = data.draw(st.sets(st.integers(1, length), max_size=6)) | {length}
    logits, cache = feed(model, ids, np.diff([0, *sorted(borders)]).tolist())
    whole = model(ids)
    assert mx.abs(logits - whole).max() < ROUNDING * mx.abs(whole).max()
    assert [type(c) for c in cache] == [KVCache] * 3
    assert all(c.offset == length for c in cache)


@families
@all_maps
def test_future_tokens_change_nothing(family, maps):
    model, ids = tempered(family, maps), tokens(1, 20)
    changed = mx.concatenate([ids[:, :13], (ids[:, 13:] + 1) % 97], axis=1)
    assert mx.array_equal(model(ids)[:, :13], model(changed)[:, :13])


@families
@all_maps
def test_rows_of_mlx_lms_batch_cache_are_as_alone(family, maps):
    """Left padding."""
    model, ids, pads = tempered(family, maps), tokens(3, 20), [0, 3, 9]
    cache = [BatchKVCache(pads) for _ in model.layers]
    together, _ = feed(model, ids, [12, 1, 1, 6], cache)
    for row, n in enumerate(pads):
        alone, _ = feed(model, ids[row : row + 1, n:], [12 - n, 1, 1, 6])
        assert mx.abs(together[row, n:] - alone[0]).max() < ROUNDING * mx.abs(alone).max()


def quantised(cache):
    return [c.to_quantized(group_size=64, bits=8) for c in cache]


class RoundedKVCache(KVCache):
    """mlx-lm's KVCache, rounding what it stores as its QuantizedKVCache does."""

    def update_and_fetch(self, keys, values):
        rounded = (mx.dequantize(*mx.quantize(x, 64, 8), 64, 8) for x in (keys, values))
        return super().update_and_fetch(*rounded)


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX's CUDA quantized_matmul has no such shape")
@all_maps
def test_quantised_keys(maps):
    """mlx-lm's --kv-bits: what differs from the plain cache is the rounding, and no more."""
    model, ids = tempered("llama", maps, hidden_size=256), tokens(1, 40)
    _, plain = feed(model, ids[:, :30], [30])
    cache = quantised(plain)
    assert [type(c) for c in cache] == [QuantizedKVCache] * 3
    rounded = [RoundedKVCache() for _ in plain]
    for to, of in zip(rounded, plain, strict=True):
        to.update_and_fetch(*(a[:, :, : of.offset] for a in (of.keys, of.values)))
    expected, _ = feed(model, ids[:, 30:], [1, 9], rounded)
    logits, _ = feed(model, ids[:, 30:], [1, 9], cache)
    assert error(logits, float64(expected)) < 1e-4
    assert error(logits, float64(feed(model, ids[:, 30:], [1, 9], plain)[0])) > 1e-4


@pytest.mark.parametrize("quantise", [False, True], ids=["plain", "8 bit"])
@all_maps
def test_trimmed_tokens_have_never_been_there(maps, quantise):
    if quantise and mx.cuda.is_available():
        pytest.skip("MLX's CUDA quantized_matmul has no such shape")
    model, ids = tempered("llama", maps, hidden_size=256), tokens(1, 30)
    caches = [feed(model, ids[:, :12], [12])[1] for _ in range(2)]
    if quantise:
        caches = list(map(quantised, caches))
    model(ids[:, 12:21] + 1, cache=caches[0])
    assert trim_prompt_cache(caches[0], 9) == 9
    after, straight = (feed(model, ids[:, 12:], [5, 1, 12], cache)[0] for cache in caches)
    assert mx.array_equal(after, straight)


# In mlx-lm's tools --------------------------------------------------------------------------------


@families
@all_maps
def test_a_fresh_graft_is_plain_attention_to_the_last_bit(family, maps):
    ids, plain = tokens(2, 33), stock(family)
    model = graft(stock(family), ssa(maps))
    assert mx.array_equal(model(ids), plain(ids))
    changed = randomised(attention_of(model.layers[0]).key_temperature, np.random.default_rng(0))
    assert tree_flatten(changed.parameters())  # the temperatures are in the graph, not bypassed
    assert mx.abs(model(ids) - plain(ids)).max() > 1e-3


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX's CUDA compiles this with CUDA's toolkit")
@all_maps
def test_lora_quantisation_and_casts_leave_temperatures_alone(maps):
    model, ids = tempered("llama", maps, hidden_size=128, intermediate_size=64), tokens(1, 9)
    before = model(ids)
    own = {n: v for n, v in tree_flatten(model.parameters()) if "temperature" in n}
    assert not any(isinstance(m, nn.Linear) for n, m in model.named_modules() if "temperature" in n)
    assert not any(map(model.cast_predicate, own))
    nn.quantize(model, group_size=64, bits=8)
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    now = dict(tree_flatten(model.parameters()))
    assert {name for name in now if "temperature" in name} == own.keys()
    assert all(mx.array_equal(now[name], value) for name, value in own.items())
    rounding = mx.sqrt(((model(ids) - before) ** 2).mean() / (before**2).mean()).item()
    assert 0 < rounding < 0.2


@pytest.mark.parametrize(
    "token_map, share",
    [
        ("linear", 1.36e-3),
        ("mlp", 7.38e-3),
        ("weight_sharing", 1.15e-4),
        ("feature_sharing", 1.1e-5),
    ],
)
def test_share_of_new_parameters_in_pythia_160m(token_map, share):
    """README's table; below 0.5 % for the shared maps. Nothing is evaluated."""
    config = {**CONFIGS["gpt_neox"], "model_type": "gpt_neox", "hidden_size": 768}
    config |= {"num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50304}
    model = gpt_neox.Model(gpt_neox.ModelArgs.from_dict(config))

    def size():
        return sum(value.size for _, value in tree_flatten(model.parameters()))

    before = size()
    assert before == 162_322_944
    graft(model, ssa((token_map, "alpha"), key=False))
    assert (size() - before) / before == pytest.approx(share, rel=0.03)


# What is refused ----------------------------------------------------------------------------------

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
OTHERS = {
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "rotary_dim": 8},
    "nanochat": SIZES | {"num_key_value_heads": 2, "intermediate_size": 48},
    "plamo": SIZES | {"intermediate_size": 48, "n_shared_head": 2},
}


def other(family):
    # mlx-lm 0.31 does not have all of them.
    module, config = pytest.importorskip(f"mlx_lm.models.{family}"), OTHERS[family]
    defaults = {"model_type": family, "vocab_size": 97, "layer_norm_epsilon": 1e-5}
    defaults |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 1e4}
    return randomise(module.Model(module.ModelArgs.from_dict(defaults | config)), 0)


@shared_maps
@pytest.mark.parametrize("family", ["gptj", "nanochat"])
def test_projections_that_a_family_does_not_show(family, token_map):
    """gptj turns a part of the keys, then of the queries; nanochat turns them by itself."""
    model, ids = other(family), tokens(1, 9)
    before = model(ids)
    with pytest.raises(UserError, match=f"{token_map} reads queries and keys before RoPE"):
        graft(model, ssa((token_map, "alpha")))
    assert mx.array_equal(model(ids), before)
    assert mx.array_equal(graft(other(family), ssa(("linear", "alpha")))(ids), before)
    values = ssa((token_map, "alpha"), query=False, key=False)
    assert mx.array_equal(graft(other(family), values)(ids), before)


@shared_maps
def test_heads_that_a_family_repeats_after_the_cache(token_map):
    """plamo caches 2 heads and repeats them for 4 queries: temperatures belong to the 2."""
    model, ids = graft(other("plamo"), ssa((token_map, "alpha"))), tokens(1, 12)
    assert mx.array_equal(model(ids), other("plamo")(ids))
    for attention in map(attention_of, model.layers):
        assert attention.key_temperature.alpha.shape == (2,)
        for part in PARTS:
            randomised(attention[f"{part}_temperature"], np.random.default_rng(0))
    whole, cache = feed(model, ids, [7, 1, 4])
    assert mx.abs(model(ids) - whole).max() < ROUNDING * mx.abs(whole).max()
    assert cache[0].values.shape[1] == 2


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"query": 1}, "attention.query must be true or false, got 1"),
        ({"key": "yes"}, "attention.key must be true or false, got 'yes'"),
        ({"value": None}, "attention.value must be true or false, got None"),
        ({"token_map": "tanh"}, "attention.token_map must be one of none, linear, mlp, weight_"),
        ({"token_map": ["mlp"]}, r"feature_sharing, got \['mlp'\]"),
        ({"position_map": "g"}, "attention.position_map must be one of none, alpha, beta, got 'g'"),
        ({"position_map": None}, "alpha, beta, got None"),
        ({"token_map": "none", "position_map": "none"}, "are both none"),
        (
            {"query": False, "value": False},
            "one of attention.query, attention.key, attention.value",
        ),
        ({"token_aware": True}, "attention.token_aware is not a field of ssa; expected query, key"),
    ],
)
def test_settings_that_are_wrong_are_told_by_name(fields, words):
    with pytest.raises(UserError, match=words):
        method_from_dict({"kind": "ssa", **fields})


@all_maps
def test_settings_come_back_from_config_json(maps):
    attention = {"query": False, "value": True, **ssa(maps)}
    assert json.loads(json.dumps(method_from_dict(attention).to_dict())) == attention
    assert method_from_dict({"kind": "ssa"}).to_dict() == {
        "kind": "ssa",
        "query": True,
        "key": False,
        "value": True,
        "token_map": "linear",
        "position_map": "alpha",
    }
