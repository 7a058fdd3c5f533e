"""Every method in every family through every cache.

A new family is a line in tiny.py, a new method a line there too, a new cache a function here.
Rows under a budget are what they are alone only where they are read in the same chunks, since each
call evicts at its end; the rows here are.
"""

import functools
import itertools
import zlib

import mlx.core as mx
import numpy as np
import pytest
from feeding import (
    Row,
    decode,
    difference,
    feed,
    left_padded_cache,
    merged,
    random_chunks,
    read_prompts,
    step,
)
from mlx_lm.models.cache import (
    QuantizedKVCache,
    can_trim_prompt_cache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from tiny import ATTENTIONS, CONFIGS, grafted, stock, tokens

from mlx_selective import UserError

MIXED = [{"kind": "selective", "budget": 9}, {"kind": "softmax"}, {"kind": "selective"}]
METHODS = {**ATTENTIONS, "mixed": MIXED}
#: (family, kind) -> words of the refusal
REFUSED = {("gpt2", "stick_breaking"): "positions of Attention do not come from RoPE"}
TOLERANCE = 2e-5
#: heads wide enough for mlx-lm's quantised keys, whatever a family calls its sizes
WIDE = {"hidden_size": 128, "n_embd": 128, "head_dim": 32}

build = functools.lru_cache(maxsize=2)(
    lambda family, method, wide=False: grafted(family, METHODS[method], **(WIDE if wide else {}))
)


def kinds(method):
    """The kinds of a method's layers."""
    layers = METHODS[method] if isinstance(METHODS[method], list) else [METHODS[method]]
    return {layer["kind"] for layer in layers}


def budgeted(method):
    """Whether keys leave before a test's sequences end."""
    return method in ("selective, pruned", "mixed")


def in_chunks(family, method, rng, folder):
    """One row without a cache, and with mlx-lm's prompt cache in random chunks."""
    model, ids = build(family, method), tokens(2, 33)
    whole = model(ids)
    for _ in range(2):
        length = 9 if budgeted(method) else 33
        chunks = random_chunks(length, rng)
        logits, cache = feed(model, ids[:, :length], chunks)
        assert difference(logits, whole[:, :length]) < TOLERANCE, chunks
        assert all(layer.offset == layer.size() == length for layer in cache)
    if budgeted(method):
        feed(model, ids[:, 9:], random_chunks(24, rng), cache)
        assert [layer.offset for layer in cache] == [33] * 3
        assert [layer.size() for layer in cache] == ([9, 33, 33] if method == "mixed" else [9] * 3)


def left_padded(family, method, rng, folder):
    """Rows that begin with padding."""
    model, ids, pads = build(family, method), tokens(3, 20), [0, 3, 9]
    chunks = [12, 1, 1, 6]
    together, _ = feed(model, ids, chunks, left_padded_cache(model, pads))
    for row, pad in enumerate(pads):
        alone, _ = feed(model, ids[row : row + 1, pad:], [12 - pad, *chunks[1:]])
        assert difference(together[row : row + 1, pad:], alone) < TOLERANCE, pad


def right_padded(family, method, rng, folder):
    """Prompts padded on the right, one of them for a whole chunk and more, then decoding."""
    model, rows, lengths = build(family, method), [Row(ids) for ids in tokens(3, 20)], [17, 5, 11]
    cache = merged([make_prompt_cache(model) for _ in rows])
    read_prompts(model, cache, rows, lengths, 5)
    decode(model, cache, rows, 3)
    for row in rows:
        assert row.difference(model) < TOLERANCE, row.chunks


def rows_come_and_go(family, method, rng, folder):
    """Rows with a history merged, one more that comes, some that leave, one that stays alone."""
    model, (a, b, c) = build(family, method), (Row(ids) for ids in tokens(3, 40))
    caches = [make_prompt_cache(model) for _ in range(3)]
    for cache, row, count in zip(caches, (a, b, c), (14, 5, 8), strict=True):
        step(model, cache, [row], [count])
    cache = merged(caches[:2])
    decode(model, cache, [a, b], 3)
    for layer, other in zip(cache, merged(caches[2:]), strict=True):
        layer.extend(other)
    decode(model, cache, [a, b, c], 2)
    read_prompts(model, cache, [a, b, c], [4, 7, 1], 4)  # a second turn
    for layer in cache:
        layer.filter([2, 0])
    decode(model, cache, [c, a], 2)
    alone = [layer.extract(1) for layer in cache]
    step(model, alone, [a], [3])
    decode(model, alone, [a], 2)
    for row in (a, b, c):
        assert row.difference(model) < TOLERANCE, row.chunks


def quantised(family, method, rng, folder):
    """mlx-lm's quantised keys, where the method reads them."""
    model, ids = build(family, method, wide=True), tokens(1, 40)
    cache = [QuantizedKVCache(group_size=32, bits=8) for _ in range(3)]
    if "selective" in kinds(method):
        with pytest.raises(UserError, match="PrunedKVCache, got Quantized"):
            model(ids, cache=cache)
        return
    if mx.cuda.is_available():
        pytest.skip("MLX's CUDA quantized_matmul has no such shape")
    logits, _ = feed(model, ids, [30, 10], cache)
    if method == "softmax":
        plain = stock(family, **WIDE)
        cache = [QuantizedKVCache(group_size=32, bits=8) for _ in range(3)]
        assert mx.array_equal(logits, feed(plain, ids, [30, 10], cache)[0])
    whole = model(ids)
    rounding = mx.sqrt(((logits - whole) ** 2).mean() / (whole**2).mean()).item()
    assert 0 < rounding < 0.1


def trimmed(family, method, rng, folder):
    """Tokens taken back, where the cache can."""
    model, ids = build(family, method), tokens(2, 20)
    _, cache = feed(model, ids[:, :15], [12, 3])
    if "selective" in kinds(method):
        assert not can_trim_prompt_cache(cache)
        return
    assert trim_prompt_cache(cache, 4) == 4
    other = mx.concatenate([ids[:, :11], tokens(2, 9, seed=5)], axis=1)
    logits, _ = feed(model, other[:, 11:], [8, 1], cache)
    assert difference(logits, model(other)[:, 11:]) < TOLERANCE


def saved(family, method, rng, folder):
    """Caches that were written to a file and read again go on as if they never were."""
    model, ids = build(family, method), tokens(2, 20)
    _, cache = feed(model, ids[:, :13], [12, 1])
    save_prompt_cache(str(folder / "cache.safetensors"), cache)
    loaded = load_prompt_cache(str(folder / "cache.safetensors"))
    assert [type(layer) for layer in loaded] == [type(layer) for layer in cache]
    expected, _ = feed(model, ids[:, 13:], [1, 6], cache)
    assert mx.array_equal(feed(model, ids[:, 13:], [1, 6], loaded)[0], expected)


CACHES = (in_chunks, left_padded, right_padded, rows_come_and_go, quantised, trimmed, saved)


def cells():
    """Every family, method and cache; in the quick run all of three families, and of the others
    each method in one cache, in turn."""
    for (f, family), (m, method), (c, cache) in itertools.product(
        *map(enumerate, (CONFIGS, METHODS, CACHES))
    ):
        quick = family in ("llama", "gpt2", "gpt_neox") or (f + m + c) % len(CACHES) == 0
        marks = () if quick else pytest.mark.slow
        yield pytest.param(
            family, method, cache, marks=marks, id=f"{cache.__name__}-{method}-{family}"
        )


@pytest.mark.parametrize("family, method, cache", cells())
def test_matrix(family, method, cache, tmp_path):
    for kind in kinds(method):
        if (family, kind) in REFUSED:
            with pytest.raises(UserError, match=REFUSED[family, kind]):
                grafted(family, METHODS[method])
            return
    seed = zlib.crc32(f"{family} {method} {cache.__name__}".encode())
    cache(family, method, np.random.default_rng(seed), tmp_path)
