"""A method of its own for each layer: attention is a list of objects, through config and graft."""

import mlx.core as mx
import pytest
from feeding import ROUNDING, difference, feed
from mlx_lm.models.cache import KVCache
from tiny import CONFIGS, attention_of, grafted, randomise, stock, tokens

from mlx_selective import PrunedKVCache, UserError, graft
from mlx_selective.attention import method_from_dict
from mlx_selective.cache import make_prompt_cache as make_budgeted

SELECTIVE, SOFTMAX = {"kind": "selective", "budget": None}, {"kind": "softmax"}
PRUNED, SSA = {"kind": "selective", "budget": 5}, {"kind": "ssa"}
STICK = {"kind": "stick_breaking", "attend_current": True}


def budgets(cache):
    """Budget of each layer; "plain" where the cache is mlx-lm's."""
    return ["plain" if type(c) is KVCache else c.budget for c in cache]


@pytest.mark.parametrize("family", CONFIGS)
def test_layers_have_the_methods_that_the_config_lists(family):
    attention, ids = [PRUNED, SOFTMAX, SSA], tokens(2, 20)
    model = grafted(family, attention)
    kinds = [attention_of(layer).attention_method.kind for layer in model.layers]
    assert kinds == ["selective", "softmax", "ssa"]
    _, cache = feed(model, ids, [12, 1, 7])
    assert [type(c) for c in cache] == [PrunedKVCache, KVCache, KVCache]
    assert [(c.size(), c.offset) for c in cache] == [(5, 20), (20, 20), (20, 20)]
    same = randomise(graft(stock(family), attention), 0, "temperature")
    assert mx.array_equal(same(ids), model(ids))


def test_a_list_of_one_method_is_that_method():
    ids = tokens(2, 20)
    for method in (SELECTIVE, SOFTMAX, SSA, STICK):
        assert mx.array_equal(grafted("llama", [method] * 3)(ids), grafted("llama", method)(ids))


def test_order_matters():
    ids, seen = tokens(1, 20), []
    for place in range(3):
        attention = [SOFTMAX] * 3
        attention[place] = SELECTIVE
        seen.append(grafted("llama", attention)(ids))
        assert difference(seen[-1], stock("llama")(ids)) > 1e-3
    assert difference(seen[0], seen[1]) > 1e-3 and difference(seen[1], seen[2]) > 1e-3


@pytest.mark.parametrize("attention", [[SELECTIVE, SOFTMAX, STICK], [STICK, SSA, SELECTIVE]])
@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3"])
def test_cached_is_whole(family, attention):
    model, ids = grafted(family, attention), tokens(2, 24)
    logits, _ = feed(model, ids, [9, 1, 1, 13])
    assert difference(logits, model(ids)) < ROUNDING


def test_budgets_go_to_the_layers_that_can_be_pruned():
    model = grafted("llama", [PRUNED, SOFTMAX, SELECTIVE])
    assert budgets(model.make_cache()) == [5, "plain", None]
    assert budgets(make_budgeted(model, 8)) == [8, "plain", 8]
    assert budgets(make_budgeted(model, [3, None, 9])) == [3, "plain", 9]
    assert budgets(make_budgeted(model, [None, None, 9])) == [None, "plain", 9]
    _, cache = feed(model, tokens(2, 20), [12, 1, 7], make_budgeted(model, [3, None, 9]))
    assert [c.size() for c in cache] == [3, 20, 9]
    assert budgets(model.make_cache()) == [5, "plain", None]  # the model's own are as they were


@pytest.mark.parametrize(
    "budget, words",
    [
        ([3, 4, 5], "a layer with softmax attention cannot have a budget"),
        ([3, None], "budget lists 2 layers, attention has 3"),
        ([3, None, 1], "at least 2 keys"),
        (1, "at least 2 keys"),
    ],
)
def test_budgets_that_do_not_fit_the_layers(budget, words):
    model = grafted("llama", [PRUNED, SOFTMAX, SELECTIVE])
    with pytest.raises(UserError, match=words):
        make_budgeted(model, budget)


def test_a_budget_needs_a_selective_layer():
    with pytest.raises(UserError, match="a budget needs a model with selective attention"):
        make_budgeted(grafted("llama", [SSA, SOFTMAX, STICK]), 8)


@pytest.mark.parametrize(
    "attention, words",
    [
        ([SELECTIVE, SOFTMAX], "attention lists 2 layers, the model has 3"),
        ([SELECTIVE] * 4, "attention lists 4 layers, the model has 3"),
        ([], "attention must be an object such as"),
        ([SELECTIVE, None, SOFTMAX], "attention must be an object such as .* got None"),
        ([SELECTIVE, [SOFTMAX], SOFTMAX], "attention must be an object such as"),
        ([SELECTIVE, {"kind": "linear"}, SOFTMAX], "attention.kind 'linear' is unknown"),
        ([SELECTIVE, {"kind": "softmax", "budget": 5}, SOFTMAX], "budget is not a field of soft"),
        ([{"kind": "mixed"}] * 3, "attention.kind 'mixed' is unknown"),
    ],
)
def test_lists_that_do_not_fit_the_model(attention, words):
    plain, ids = stock("llama"), tokens(1, 5)
    before = plain(ids)
    for build in (lambda: grafted("llama", attention), lambda: graft(plain, attention)):
        with pytest.raises(UserError, match=words):
            build()
    assert mx.array_equal(plain(ids), before)


def test_one_layer_that_cannot_take_its_method_keeps_all_as_they_were():
    plain = stock("gpt2")
    with pytest.raises(UserError, match="do not come from RoPE"):
        graft(plain, [SELECTIVE, SSA, STICK])
    assert type(plain).__name__ == "Model"
    assert not any(hasattr(attention_of(layer), "attention_method") for layer in plain.layers)


def test_the_config_comes_back_as_it_was():
    attention = [PRUNED, SOFTMAX, {**SELECTIVE, "budget": None}]
    method = method_from_dict(attention)
    assert method.to_dict() == attention
    assert method_from_dict(method.to_dict()) == method
    assert grafted("llama", attention).attention == method
