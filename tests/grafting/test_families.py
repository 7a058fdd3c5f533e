"""Further families of mlx-lm, grafted as the nine of the matrix: a line in tiny_families.py."""

import mlx.core as mx
import pytest
from feeding import ROUNDING, difference, feed
from mlx_lm.models.cache import KVCache
from tiny import config_of, grafted, present, randomise, stock, tokens
from tiny_families import MORE

from mlx_selective import PrunedKVCache, UserError, graft
from mlx_selective.model import ModelArgs

families = pytest.mark.parametrize("family", present(MORE))
#: no position at all in some layers, or positions that do not come from a part called rope
NOT_ONLY_ROPE = {"afmoe", "gpt_bigcode", "llama4_text", "ministral3", "nanochat", "talkie"}
CHUNKS = [12, 1, 1, 6]


@families
def test_softmax_graft_is_mlx_lm_to_the_last_bit(family):
    ids, plain, model = tokens(2, 20), stock(family), graft(stock(family), {"kind": "softmax"})
    assert mx.array_equal(model(ids), plain(ids))
    (logits, cache), (expected, _) = feed(model, ids, CHUNKS), feed(plain, ids, CHUNKS)
    assert mx.array_equal(logits, expected)
    assert [type(layer) for layer in cache] == [KVCache] * 3


@families
@pytest.mark.parametrize("kind", ["selective", "ssa", "stick_breaking"])
def test_cached_is_whole(family, kind):
    ids, model = tokens(2, 20), stock(family)
    if kind == "stick_breaking" and family in NOT_ONLY_ROPE:
        with pytest.raises(
            UserError, match="do not come from RoPE|scales queries by their position"
        ):
            graft(model, {"kind": kind})
        return
    before = model(ids)
    randomise(graft(model, {"kind": kind}), 0, "temperature")
    whole = model(ids)
    assert difference(whole, before) > 1e-3
    logits, cache = feed(model, ids, CHUNKS)
    assert difference(logits, whole) < ROUNDING
    assert isinstance(cache[0], PrunedKVCache) == (kind == "selective")


@families
def test_a_config_builds_it(family):
    attention = {"kind": "selective", "budget": 5}
    args = ModelArgs({**config_of(family), "base_model_type": family, "attention": attention})
    assert (args.model_type, args.base_model_type) == ("mlx_selective", family)
    model, ids = grafted(family, attention), tokens(1, 12)
    _, cache = feed(model, ids, [7, 1, 4])
    assert [(layer.size(), layer.offset) for layer in cache] == [(5, 12)] * 3
