"""Grafted models: equal to mlx-lm's where they should be, and mlx-lm's in all but attention."""

import copy
import pickle
import sys

import mlx.core as mx
import mlx.nn as nn
import pytest
from feeding import ROUNDING, difference, feed, left_padded_cache
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from tiny import ATTENTIONS, CONFIGS, attention_of, grafted, module_of, randomise, stock, tokens

from mlx_selective import PrunedKVCache, UserError, graft
from mlx_selective.attention.selective.layer import SelectiveCall
from mlx_selective.cache import make_prompt_cache as make_budgeted
from mlx_selective.grafting.attention_code import INTERCEPTED

families = pytest.mark.parametrize("family", CONFIGS)
#: of those that have a RoPE to leave out
with_rope = pytest.mark.parametrize("family", [name for name in CONFIGS if name != "gpt2"])
CASES = [
    pytest.param(family, attention, id=f"{family}-{name}")
    for family in CONFIGS
    for name, attention in ATTENTIONS.items()
    if (family, attention["kind"]) != ("gpt2", "stick_breaking")
]
cases = pytest.mark.parametrize("family, attention", CASES)


@families
def test_softmax_graft_is_mlx_lm_to_the_last_bit(family):
    ids = tokens(2, 40)
    plain, model = stock(family), grafted(family, {"kind": "softmax"})
    assert mx.array_equal(plain(ids), model(ids))
    chunks = [17, 1, 1, 21]
    assert mx.array_equal(feed(plain, ids, chunks)[0], feed(model, ids, chunks)[0])
    caches = [left_padded_cache(net, [0, 5]) for net in (plain, model)]
    logits = [
        feed(net, ids, chunks, cache)[0] for net, cache in zip((plain, model), caches, strict=True)
    ]
    assert mx.array_equal(*logits)


@families
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_softmax_graft_in_half_precision(family, dtype):
    ids, nets = tokens(1, 12), [stock(family), graft(stock(family), {"kind": "softmax"})]
    for net in nets:
        net.set_dtype(dtype)
    assert mx.array_equal(*(net(ids) for net in nets))
    assert nets[1](ids).dtype == nets[0](ids).dtype


@pytest.mark.parametrize("kind", ["softmax", "selective"])
def test_models_with_other_weights_are_grafted_as_they_are(kind):
    """Quantised ones, and ones with LoRA layers."""
    ids = tokens(1, 12)

    def quantised():
        model = stock("llama", hidden_size=64, intermediate_size=64)
        nn.quantize(model, group_size=32)
        return model

    def adapted():
        model = stock("llama")
        linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
        return randomise(model, 0, "lora_b")

    for make in (quantised, adapted):
        plain, model = make(), make()
        model.update(plain.parameters())
        graft(model, {"kind": kind})
        assert mx.array_equal(model(ids), plain(ids)) == (kind == "softmax")


@families
def test_graft_on_a_loaded_model_is_one_line(family):
    ids = tokens(1, 12)
    model = graft(stock(family), {"kind": "selective", "budget": 5})
    assert mx.array_equal(model(ids), grafted(family, {"kind": "selective"})(ids))
    _, cache = feed(model, ids, [12])
    assert [type(c) for c in cache] == [PrunedKVCache] * 3
    assert [(c.size(), c.offset) for c in cache] == [(5, 12)] * 3


@families
def test_selective_without_selection_is_plain_attention(family, monkeypatch):
    """With the queries of head 0 set to 0 in both, its logits are 0 and select nothing."""
    ids, plain, model = tokens(2, 33), stock(family), grafted(family, {"kind": "selective"})
    assert difference(model(ids), plain(ids)) > 0.01

    def silenced(attend, at):
        def attend_without_head_0(*args, **kwargs):
            queries = args[at]
            others = mx.arange(queries.shape[1])[:, None, None] > 0
            return attend(*args[:at], mx.where(others, queries, 0), *args[at + 1 :], **kwargs)

        return attend_without_head_0

    code = sys.modules[type(attention_of(plain.layers[0])).__module__]
    monkeypatch.setattr(code, INTERCEPTED, silenced(getattr(code, INTERCEPTED), 0))
    monkeypatch.setattr(SelectiveCall, "attend", silenced(SelectiveCall.attend, 1))
    assert difference(model(ids), plain(ids)) < ROUNDING


@families
@pytest.mark.parametrize("form", ["alpha", "beta"])
def test_fresh_ssa_is_plain_attention_to_the_last_bit(family, form):
    ids = tokens(2, 33)
    model = graft(stock(family), {"kind": "ssa", "key": True, "position_map": form})
    assert mx.array_equal(model(ids), stock(family)(ids))
    for layer in model.layers:  # the temperatures are in the graph, not bypassed
        attention_of(layer).query_temperature.weight[:] = 0.5
    assert difference(model(ids), stock(family)(ids)) > 1e-3


@pytest.mark.parametrize("family, theta", [("granite", 50.0), ("qwen3", 20.0), ("phi3", 20.0)])
def test_stick_breaking_has_no_positions(family, theta):
    """Rotating every key and query alike is RoPE's business; here its base has no effect."""
    ids, attention = tokens(1, 20), {"kind": "stick_breaking"}
    first = grafted(family, attention)(ids)
    assert mx.array_equal(first, grafted(family, attention, rope_theta=theta)(ids))
    other = grafted(family, {"kind": "softmax"}, rope_theta=theta)(ids)
    assert difference(other, stock(family)(ids)) > 1e-3


@cases
def test_future_tokens_change_nothing(family, attention):
    model, ids = grafted(family, attention), tokens(1, 20)
    changed = mx.concatenate([ids[:, :13], (ids[:, 13:] + 1) % 97], axis=1)
    assert mx.array_equal(model(ids)[:, :13], model(changed)[:, :13])
    assert not mx.array_equal(model(ids)[:, 13:], model(changed)[:, 13:])


@families
def test_tokens_after_pruning_differ_only_by_the_pruning(family):
    """Up to the budget nothing changes; beyond it, something does."""
    model, ids = grafted(family, {"kind": "selective", "budget": 9}), tokens(1, 20)
    pruned, _ = feed(model, ids, [1] * 20)
    whole = model(ids)
    assert difference(pruned[:, :9], whole[:, :9]) < ROUNDING
    assert difference(pruned[:, 12:], whole[:, 12:]) > 10 * ROUNDING


@cases
def test_parameter_names_are_mlx_lms(family, attention):
    ours = dict(tree_flatten(grafted(family, attention).parameters()))
    theirs = dict(tree_flatten(stock(family).parameters()))
    parts = ("_temperature.", ".head_bias", ".head_norm.")
    assert all(any(part in name for part in parts) for name in ours.keys() - theirs.keys())
    assert theirs.keys() <= ours.keys()


# The mask -----------------------------------------------------------------------------------------


def wrong_mask(h, cache=None, window_size=None, return_array=False):
    """What no layer should see: every query sees its own key and nothing else."""
    reach = h.shape[1] if cache is None else h.shape[1] + mx.array(cache.offset).max().item()
    return mx.arange(reach)[reach - h.shape[1] :, None] == mx.arange(reach)


@cases
def test_the_mask_that_the_model_built_is_ignored(family, attention, monkeypatch):
    model, plain, ids = grafted(family, attention), stock(family), tokens(2, 20)
    whole, (chunked, _), before = model(ids), feed(model, ids, [12, 1, 7]), plain(ids)
    monkeypatch.setattr(module_of(family), "create_attention_mask", wrong_mask)
    assert mx.array_equal(model(ids), whole)
    assert mx.array_equal(feed(model, ids, [12, 1, 7])[0], chunked)
    assert difference(plain(ids), before) > 1e-3  # the patch reaches the model


PADS, PADDED_CHUNKS = [0, 6, 11], [14, 1, 1, 8]


def caches_of_padded_rows(model):
    """The caches of a left-padded batch, each of whose rows gets the logits that it gets alone."""
    ids = tokens(3, 24)
    together, cache = feed(model, ids, PADDED_CHUNKS, left_padded_cache(model, PADS))
    for row, pad in enumerate(PADS):
        alone, _ = feed(model, ids[row : row + 1, pad:], [14 - pad, *PADDED_CHUNKS[1:]])
        assert difference(together[row : row + 1, pad:], alone) < ROUNDING
    return cache


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_every_layer_asks_its_own_cache_for_its_keys(family):
    """Budgets of their own leave the layers of a padded batch with other keys than the first."""
    cache = caches_of_padded_rows(grafted(family, {"kind": "selective", "budget": [4, None, 7]}))
    assert [c.kept for c in cache] == [[4] * 3, [24, 18, 13], [7] * 3]


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_every_layer_asks_its_own_cache_for_its_mask(family, first):
    """A pruned cache gives no mask, mlx-lm's one that hides padding: not those of another layer."""
    last = {"kind": "ssa"} if family == "gpt2" else {"kind": "stick_breaking"}  # it has no RoPE
    methods = [{"kind": "selective", "budget": 4}, {"kind": "softmax"}, last]
    cache = caches_of_padded_rows(grafted(family, methods[first:] + methods[:first]))
    assert [type(c) is PrunedKVCache for c in cache] == [(i + first) % 3 == 0 for i in range(3)]


# What stays mlx-lm's, and what is refused ---------------------------------------------------------


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_lora_layers_leave_temperatures_alone(attention):
    model = grafted("llama", attention)
    ids = tokens(1, 9)
    before = model(ids)
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    assert mx.array_equal(model(ids), before)
    names = [name for name, _ in tree_flatten(model.parameters()) if "lora_a" in name]
    assert len(names) == 3 * 7
    assert not any("temperature" in name for name in names)


def test_temperatures_stay_float32_when_mlx_lm_casts():
    model = grafted("llama", {"kind": "ssa"})
    assert model.cast_predicate("model.layers.0.self_attn.q_proj.weight")
    assert not model.cast_predicate("model.layers.0.self_attn.query_temperature.alpha")


@pytest.mark.parametrize(
    "attention, words",
    [
        ({"kind": "linear"}, "attention.kind 'linear' is unknown"),
        ("selective", "attention must be an object"),
        ({"kind": "selective", "tau": 1}, "attention.tau is not a field"),
        ({"kind": "selective", "budget": 1}, "at least 2 keys"),
        ({"kind": "selective", "budget": True}, "at least 2 keys"),
        ({"kind": "selective", "budget": [8, "9"]}, "got '9'"),
        ({"kind": "selective", "budget": 2**31}, "got 2147483648"),
        ({"kind": "selective", "budget": 8.0}, "a layer, an int"),
        ({"kind": "selective", "budget": [4, 5]}, "lists 2 layers, the model has 3"),
        ({"kind": "ssa", "query": 1}, "attention.query must be true"),
        ({"kind": "ssa", "position_map": "g"}, "alpha, beta, got 'g'"),
        ({"kind": "stick_breaking", "attend_current": 0}, "true or false"),
    ],
)
def test_settings_that_do_not_fit_are_told(attention, words):
    with pytest.raises(UserError, match=words):
        graft(stock("llama"), attention)


def test_a_model_is_grafted_once():
    with pytest.raises(UserError, match="already carries ssa"):
        graft(grafted("llama", {"kind": "ssa"}), {"kind": "ssa"})


def test_selective_layers_refuse_another_models_cache():
    model = grafted("llama", {"kind": "selective"})
    with pytest.raises(UserError, match="PrunedKVCache, got KVCache"):
        model(tokens(1, 3), cache=[KVCache() for _ in range(3)])


@pytest.mark.parametrize(
    "attention, words",
    [
        ({"kind": "selective"}, "selective attention cannot be sharded"),
        ({"kind": "ssa"}, "ssa attention cannot be sharded"),
        ({"kind": "stick_breaking"}, "stick_breaking attention cannot be sharded"),
        ([{"kind": "softmax"}] * 2 + [{"kind": "ssa"}], "attention cannot be sharded"),
    ],
)
def test_heads_are_not_spread_over_machines(attention, words):
    """Every rank would have a head 0 of its own, or another's temperatures."""
    model, ids = grafted("llama", attention), tokens(1, 9)
    before = model(ids)
    with pytest.raises(UserError, match=words):
        model.shard(mx.distributed.init())
    assert {type(attention_of(layer).q_proj) for layer in model.layers} == {nn.Linear}
    assert mx.array_equal(model(ids), before)


def test_softmax_is_sharded_as_mlx_lm_shards_it():
    model, plain, ids = grafted("llama", {"kind": "softmax"}), stock("llama"), tokens(1, 9)
    for net in (model, plain):
        net.shard(mx.distributed.init())
    assert isinstance(attention_of(model.layers[0]).q_proj, nn.AllToShardedLinear)
    assert mx.array_equal(model(ids), plain(ids))


def test_budget_needs_selective_attention():
    with pytest.raises(UserError, match="this model has ssa"):
        make_budgeted(grafted("llama", {"kind": "ssa"}), 8)
    with pytest.raises(UserError, match="without it"):
        make_budgeted(stock("llama"), 8)


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


def test_a_head_size_that_cannot_be_rotated_is_told():
    with pytest.raises(UserError, match="15 rotated dimensions"):
        grafted("llama", {"kind": "selective"}, head_dim=15)
    ids = tokens(1, 5)
    assert grafted("llama", {"kind": "stick_breaking"}, head_dim=15)(ids).shape == (1, 5, 97)


@cases
def test_copies_and_pickles(family, attention):
    model, ids = grafted(family, attention), tokens(1, 9)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert mx.array_equal(other(ids), model(ids))
        assert list(map(type, other.make_cache())) == list(map(type, model.make_cache()))


def test_rope_settings_of_transformers_5():
    """Nested in rope_parameters; what stands beside it, as convert writes it, goes first."""
    attention, ids = {"kind": "selective"}, tokens(1, 30)
    nested = {"rope_theta": 50.0, "rope_type": "default"}
    model = grafted("llama", attention, rope_parameters=nested)
    assert mx.array_equal(model(ids), grafted("llama", attention, rope_theta=50.0)(ids))
    assert not mx.array_equal(model(ids), grafted("llama", attention)(ids))
    both = grafted("llama", attention, rope_parameters=nested, rope_theta=10000.0)
    assert mx.array_equal(both(ids), grafted("llama", attention)(ids))
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    linear = grafted("llama", attention, rope_scaling={"type": "linear", "factor": 4.0})
    assert mx.array_equal(grafted("llama", attention, rope_parameters=scaled)(ids), linear(ids))
    neox = grafted("gpt_neox", attention, rope_parameters={"partial_rotary_factor": 0.5})
    assert neox.args.rotary_pct == CONFIGS["gpt_neox"]["rotary_pct"]
