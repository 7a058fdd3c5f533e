"""A new attention method, from nothing to a model that decodes: what it takes is in this file.

In the package it would be a definition and a layer in a folder of its own, and a line in
``attention/__init__.py``: three files, as ``METHODS`` is all that knows the methods.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from tiny import CONFIGS, grafted, stock, tokens

from mlx_selective import AttentionMethod, UserError, graft
from mlx_selective.attention import METHODS, LayerCall


def recency_attention(q, k, v, *, rate, visible):
    """Values averaged under weights rate ** age: no logits, no softmax, no positions."""
    groups = q.shape[1] // v.shape[1]
    index = mx.arange(k.shape[2])
    age = index[k.shape[2] - q.shape[2] :, None] - index[None]
    weights = mx.where((age >= 0) & visible, rate**age, 0.0)
    weights = weights / mx.maximum(weights.sum(axis=-1, keepdims=True), 1e-9)
    return mx.broadcast_to(weights, (*q.shape[:3], k.shape[2])) @ mx.repeat(v, groups, axis=1)


class RecencyCall(LayerCall):
    def attend(self, queries, keys, values, scale):
        visible = self.mask if isinstance(self.mask, mx.array) else mx.array(True)
        return recency_attention(queries, keys, values, rate=self.method.rate, visible=visible)


@dataclass(frozen=True)
class Recency(AttentionMethod):
    kind = "recency"
    call = RecencyCall

    rate: float = 0.7


@pytest.fixture
def registered(monkeypatch):
    """The line in attention/__init__.py."""
    monkeypatch.setitem(METHODS, Recency.kind, Recency)


def test_definition():
    k = v = mx.array([[[[1.0], [2.0], [4.0]]]])
    output = recency_attention(k, k, v, rate=0.5, visible=mx.array(True))
    expected = [1, (2 + 0.5) / 1.5, (4 + 1 + 0.25) / 1.75]
    assert np.allclose(np.array(output).ravel(), expected)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2"])
def test_decodes_with_a_cache_and_in_a_batch(registered, family):
    model = grafted(family, {"kind": "recency", "rate": 0.6})
    ids = tokens(2, 20)
    whole = model(ids)
    assert mx.abs(whole - stock(family)(ids)).max() > 1e-2 * mx.abs(whole).max()
    for cache in (make_prompt_cache(model), [BatchKVCache([0, 0]) for _ in model.layers]):
        chunks = [model(ids[:, a:b], cache=cache) for a, b in ((0, 11), (11, 12), (12, 20))]
        logits = mx.concatenate(chunks, axis=1)
        assert mx.abs(logits - whole).max() < 2e-5 * mx.abs(whole).max()
    assert all(type(c) is KVCache for c in model.make_cache())
    cache = [BatchKVCache([0, 4]) for _ in model.layers]
    padded, alone = model(ids, cache=cache)[1, 4:], model(ids[1:, 4:])[0]
    assert mx.abs(padded - alone).max() < 2e-5 * mx.abs(alone).max()


def test_config_graft_and_mixture_know_it(registered):
    mixed = [{"kind": "recency"}, {"kind": "selective", "budget": 4}, {"kind": "softmax"}]
    model = grafted("llama", mixed)
    assert model.attention.to_dict()[0] == {"kind": "recency", "rate": 0.7}
    assert [type(c).__name__ for c in model.make_cache()] == ["KVCache", "PrunedKVCache", "KVCache"]
    assert mx.isfinite(model(tokens(1, 9), cache=make_prompt_cache(model))).all()
    with pytest.raises(UserError, match="attention.speed is not a field of recency"):
        grafted("llama", {"kind": "recency", "speed": 1})


def test_a_graft_needs_no_registration():
    ids = tokens(1, 9)
    model = graft(stock("llama"), Recency(rate=0.6))
    assert model.attention.kind == "recency" and len(model.make_cache()) == len(model.layers)
    assert CONFIGS["llama"]["num_hidden_layers"] == len(model.layers)
    assert mx.isfinite(model(ids)).all()
