"""Grafted models: equal to mlx-lm where they should be, and to themselves however they are fed."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import BatchKVCache, KVCache, QuantizedKVCache, make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny import ATTENTIONS, CONFIGS, grafted, stock, tokens

from mlx_selective import PrunedKVCache, UserError, graft
from mlx_selective.cache import make_prompt_cache as make_budgeted

families = pytest.mark.parametrize("family", CONFIGS)
attentions = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)


def feed(model, ids, chunks, cache=None):
    """Logits of all tokens, fed in chunks through caches."""
    cache = make_prompt_cache(model) if cache is None else cache
    logits, start = [], 0
    for chunk in chunks:
        logits.append(model(ids[:, start : start + chunk], cache=cache))
        start += chunk
    return mx.concatenate(logits, axis=1), cache


@families
def test_softmax_graft_is_mlx_lm_to_the_last_bit(family):
    ids = tokens(2, 40)
    plain, model = stock(family), grafted(family, {"kind": "softmax"})
    assert mx.array_equal(plain(ids), model(ids))
    chunks = [17, 1, 1, 21]
    assert mx.array_equal(feed(plain, ids, chunks)[0], feed(model, ids, chunks)[0])


@families
def test_graft_on_a_loaded_model_is_one_line(family):
    ids = tokens(1, 12)
    model = graft(stock(family), {"kind": "selective", "budget": 5})
    assert mx.array_equal(model(ids), grafted(family, {"kind": "selective"})(ids))
    _, cache = feed(model, ids, [12])
    assert [type(c) for c in cache] == [PrunedKVCache] * 3
    assert [(c.size(), c.offset) for c in cache] == [(5, 12)] * 3


@families
def test_selective_without_selection_is_plain_attention(family):
    """Head 0's queries are zeroed in the weights, so its logits are 0 and select nothing."""
    plain, model = stock(family), grafted(family, {"kind": "selective"})
    for net in (plain, model):
        for layer in net.layers:
            attention = layer.attention if family == "gpt_neox" else layer.self_attn
            if family == "gpt_neox":
                attention.query_key_value.weight[:8] = 0
                attention.query_key_value.bias[:8] = 0
            else:
                attention.q_proj.weight[:8] = 0
    ids = tokens(2, 33)
    expected = plain(ids)
    assert mx.abs(model(ids) - expected).max() < 1e-5 * mx.abs(expected).max()
    # the weights matter: with head 0 as it was, the models differ
    other = grafted(family, {"kind": "selective"})(ids)
    assert mx.abs(other - stock(family)(ids)).max() > 0.01 * mx.abs(expected).max()


@families
@pytest.mark.parametrize("form", ["alpha", "beta"])
def test_fresh_ssa_is_plain_attention_to_the_last_bit(family, form):
    ids = tokens(2, 33)
    model = graft(stock(family), {"kind": "ssa", "position_form": form})
    assert mx.array_equal(model(ids), stock(family)(ids))
    for layer in model.layers:  # the temperatures are in the graph, not bypassed
        attention = layer.attention if family == "gpt_neox" else layer.self_attn
        attention.query_temperature.weight[:] = 0.5
    assert mx.abs(model(ids) - stock(family)(ids)).max() > 1e-3


def test_stick_breaking_has_no_positions():
    """Rotating every key and query alike is RoPE's business; here its base has no effect."""
    ids = tokens(1, 20)
    attention = {"kind": "stick_breaking"}
    first = grafted("granite", attention)(ids)
    assert mx.array_equal(first, grafted("granite", attention, rope_theta=50.0)(ids))
    assert not mx.array_equal(
        stock("granite")(ids), grafted("granite", {"kind": "softmax"}, rope_theta=50.0)(ids)
    )


@families
@attentions
@settings(max_examples=4, deadline=None)
@given(length=st.sampled_from([1, 7, 33]), data=st.data())
def test_cached_and_chunked_are_the_whole(family, attention, length, data):
    if "budget" in attention:
        attention = {**attention, "budget": length + 1}
    model, ids = grafted(family, attention), tokens(2, length)
    borders = data.draw(st.sets(st.integers(1, max(1, length - 1)), max_size=6))
    edges = [0, *sorted(b for b in borders if b < length), length]
    logits, cache = feed(model, ids, np.diff(edges).tolist())
    whole = model(ids)
    assert mx.abs(logits - whole).max() < 2e-5 * mx.abs(whole).max()
    assert all(c.offset == c.size() == length for c in cache)


@families
@attentions
def test_future_tokens_change_nothing(family, attention):
    model, ids = grafted(family, attention), tokens(1, 20)
    changed = mx.concatenate([ids[:, :13], (ids[:, 13:] + 1) % 97], axis=1)
    assert mx.array_equal(model(ids)[:, :13], model(changed)[:, :13])


@families
def test_tokens_after_pruning_differ_only_by_the_pruning(family):
    """Up to the budget nothing changes; beyond it, something does."""
    model, ids = grafted(family, {"kind": "selective", "budget": 9}), tokens(1, 20)
    pruned, _ = feed(model, ids, [1] * 20)
    whole = model(ids)
    scale = mx.abs(whole).max()
    assert mx.abs(pruned[:, :9] - whole[:, :9]).max() < 2e-5 * scale
    assert mx.abs(pruned[:, 12:] - whole[:, 12:]).max() > 1e-4 * scale


def test_layers_may_have_budgets_of_their_own():
    model, ids = grafted("llama", {"kind": "selective", "budget": [4, None, 7]}), tokens(2, 15)
    logits, cache = feed(model, ids, [6, 1, 1, 7])
    assert [c.size() for c in cache] == [4, 15, 7]
    assert mx.isfinite(logits).all()
    assert [c.budget for c in make_budgeted(model, 6)] == [6, 6, 6]
    with pytest.raises(UserError, match="lists 2 layers, the model has 3"):
        grafted("llama", {"kind": "selective", "budget": [4, 5]})


@families
@attentions
def test_parameter_names_are_mlx_lms(family, attention):
    ours = dict(tree_flatten(grafted(family, attention).parameters()))
    theirs = dict(tree_flatten(stock(family).parameters()))
    extra = {name.split(".")[-2] for name in ours.keys() - theirs.keys()}
    assert extra <= {"query_temperature", "value_temperature"}
    assert theirs.keys() <= ours.keys()


@pytest.mark.skipif(mx.cuda.is_available(), reason="MLX's CUDA quantized_matmul has no such shape")
def test_quantised_keys_work_with_ssa():
    """A plain KVCache, so mlx-lm's --kv-bits applies."""
    model = grafted("llama", {"kind": "ssa"}, hidden_size=256)
    ids = tokens(1, 40)
    whole, cache = feed(model, ids, [30, 10])
    assert all(type(c) is KVCache for c in cache)
    _, cache = feed(model, ids[:, :30], [30])
    quantised = [c.to_quantized(group_size=64, bits=8) for c in cache]
    assert all(type(c) is QuantizedKVCache for c in quantised)
    logits = model(ids[:, 30:], cache=quantised)
    rounding = mx.sqrt(((logits - whole[:, 30:]) ** 2).mean() / (whole**2).mean()).item()
    assert 0 < rounding < 0.1


@attentions
def test_lora_layers_leave_temperatures_alone(attention):
    model = grafted("llama", attention)
    ids = tokens(1, 9)
    before = model(ids)
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    assert mx.array_equal(model(ids), before)
    names = [name for name, _ in tree_flatten(model.parameters()) if "lora_a" in name]
    assert len(names) == 3 * 7
    assert not any("temperature" in name for name in names)


def gelu_of(family_config_act):
    return grafted("gpt_neox", {"kind": "softmax"}, hidden_act=family_config_act)


def test_gpt_neox_gelu_is_what_the_config_says():
    """mlx-lm approximates always; transformers' "gelu" is x * Phi(x)."""
    from math import erf, sqrt

    x = mx.linspace(-4, 4, 101)
    exact = np.array([v * 0.5 * (1 + erf(v / sqrt(2))) for v in np.array(x, np.float64)])
    mlp = gelu_of("gelu").layers[0].mlp
    mlp.dense_h_to_4h = mlp.dense_4h_to_h = lambda v: v
    assert np.abs(np.array(mlp(x)) - exact).max() < 1e-6
    mlp = gelu_of("gelu_new").layers[0].mlp
    mlp.dense_h_to_4h = mlp.dense_4h_to_h = lambda v: v
    assert 1e-4 < np.abs(np.array(mlp(x)) - exact).max() < 1e-3
    with pytest.raises(UserError, match="hidden_act 'relu'"):
        gelu_of("relu")


def sliding_llama():
    config = {**CONFIGS["llama"], "model_type": "llama", "sliding_window": 8}
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    return llama.Model(llama.ModelArgs.from_dict(config))


@pytest.mark.parametrize(
    "model, attention, words",
    [
        (lambda: stock("llama"), {"kind": "linear"}, "attention.kind 'linear' is unknown"),
        (lambda: stock("llama"), "selective", "attention must be an object"),
        (lambda: stock("llama"), {"kind": "selective", "tau": 1}, "attention.tau is not a field"),
        (lambda: stock("llama"), {"kind": "selective", "budget": 1}, "at least 2 keys"),
        (lambda: stock("llama"), {"kind": "selective", "budget": True}, "at least 2 keys"),
        (lambda: stock("llama"), {"kind": "selective", "budget": [8, "9"]}, "got '9'"),
        (lambda: stock("llama"), {"kind": "selective", "budget": 2**31}, "got 2147483648"),
        (lambda: stock("llama"), {"kind": "selective", "budget": 8.0}, "a layer, an int"),
        (lambda: stock("llama"), {"kind": "ssa", "query": 1}, "attention.query must be true"),
        (lambda: stock("llama"), {"kind": "ssa", "position_form": "g"}, "alpha, beta, got 'g'"),
        (lambda: stock("llama"), {"kind": "stick_breaking", "attend_current": 0}, "true or false"),
        (sliding_llama, {"kind": "selective"}, "sliding-window layers"),
        (lambda: grafted("llama", {"kind": "ssa"}), {"kind": "ssa"}, "already carries ssa"),
    ],
)
def test_what_cannot_be_grafted_is_told_by_name(model, attention, words):
    with pytest.raises(UserError, match=words):
        graft(model(), attention)


def test_unknown_family_is_told():
    from mlx_lm.models import qwen2

    args = qwen2.ModelArgs.from_dict({**CONFIGS["llama"], "model_type": "qwen2"})
    with pytest.raises(UserError, match="'qwen2' cannot be grafted yet"):
        graft(qwen2.Model(args), {"kind": "selective"})


def test_selective_layers_refuse_another_models_cache():
    model = grafted("llama", {"kind": "selective"})
    with pytest.raises(UserError, match="PrunedKVCache, got KVCache"):
        model(tokens(1, 3), cache=[KVCache() for _ in range(3)])


def test_budget_needs_selective_attention():
    with pytest.raises(UserError, match="this model has ssa"):
        make_budgeted(grafted("llama", {"kind": "ssa"}), 8)
    with pytest.raises(UserError, match="without it"):
        make_budgeted(stock("llama"), 8)


@families
@pytest.mark.parametrize("kind", ["softmax", "ssa", "stick_breaking"])
def test_rows_of_mlx_lms_batch_cache_are_as_alone(family, kind):
    """These methods have mlx-lm's KVCache, which its server and batch_generate merge."""
    model, pads = grafted(family, {"kind": kind}), [0, 3, 9]
    ids = tokens(3, 20)
    for attention in [
        layer.attention if family == "gpt_neox" else layer.self_attn
        for layer in model.layers
        if kind == "ssa"
    ]:
        attention.query_temperature.alpha = mx.array([-1.0, 0.0, 1.0, 2.0])
    cache = [BatchKVCache(pads) for _ in model.layers]
    together, _ = feed(model, ids, [12, 1, 1, 6], cache)
    for row, n in enumerate(pads):
        alone, _ = feed(model, ids[row : row + 1, n:], [12 - n, 1, 1, 6])
        difference = mx.abs(together[row, n:] - alone[0])
        assert difference.max() < 2e-5 * mx.abs(alone).max()


def test_selective_caches_are_not_merged_silently():
    """Until they can be batched, mlx-lm must see that they cannot."""
    (cache, *_) = make_prompt_cache(grafted("llama", {"kind": "selective"}))
    assert not hasattr(cache, "merge")


def test_stick_breaking_refuses_quantised_keys():
    model, ids = grafted("llama", {"kind": "stick_breaking"}, hidden_size=256), tokens(1, 5)
    cache = [QuantizedKVCache(group_size=64, bits=8) for _ in range(3)]
    with pytest.raises(UserError, match="quantised KV cache"):
        model(ids, cache=cache)


def test_a_refused_graft_changes_nothing():
    model, ids = stock("llama"), tokens(1, 8)
    before = model(ids)
    with pytest.raises(UserError, match="lists 2 layers"):
        graft(model, {"kind": "selective", "budget": [4, 5]})
    model.layers[2].self_attn, kept = nn.Linear(32, 32), model.layers[2].self_attn
    with pytest.raises(UserError, match="has no part that calls"):
        graft(model, {"kind": "ssa"})
    model.layers[2].self_attn = kept
    assert type(model) is llama.Model
    assert mx.array_equal(model(ids), before)


def test_temperatures_stay_float32_when_mlx_lm_casts():
    model = grafted("llama", {"kind": "ssa"})
    assert model.cast_predicate("model.layers.0.self_attn.q_proj.weight")
    assert not model.cast_predicate("model.layers.0.self_attn.query_temperature.alpha")


def test_a_head_size_that_cannot_be_rotated_is_told():
    with pytest.raises(UserError, match="15 rotated dimensions"):
        grafted("llama", {"kind": "selective"}, head_dim=15)
    ids = tokens(1, 5)
    assert grafted("llama", {"kind": "stick_breaking"}, head_dim=15)(ids).shape == (1, 5, 97)
