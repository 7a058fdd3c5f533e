"""Feeding models through caches: in chunks, in padded batches, and in batches whose rows change."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache

from mlx_selective import PrunedKVCache

#: Relative difference of float32 logits that other orders of summation, as on other machines, may
#: make: 3e-5 was seen where sharp temperatures meet. Tests that must see a difference ask for more.
ROUNDING = 1e-4


def feed(model, ids, chunks, cache=None):
    """Logits of all tokens, fed in chunks through caches; the caches."""
    cache = make_prompt_cache(model) if cache is None else cache
    edges = np.cumsum([0, *chunks]).tolist()
    logits = [model(ids[:, a:b], cache=cache) for a, b in zip(edges, edges[1:], strict=False)]
    return mx.concatenate(logits, axis=1), cache


def random_chunks(length, rng):
    """Sizes that add up to ``length``, single tokens among them."""
    borders = rng.choice(np.arange(1, length), size=min(5, length - 1), replace=False)
    return np.diff([0, *sorted(borders), length]).tolist()


def difference(logits, expected):
    """Largest difference, relative to the largest logit."""
    assert logits.shape == expected.shape
    return (mx.abs(logits - expected).max() / mx.abs(expected).max()).item()


def left_padded_cache(model, pads):
    """Empty caches of a batch whose rows begin with padding."""
    caches = make_prompt_cache(model)
    for index, cache in enumerate(caches):
        if isinstance(cache, PrunedKVCache):
            cache.prepare(left_padding=pads)
        else:
            assert type(cache) is KVCache
            caches[index] = BatchKVCache(pads)
    return caches


def merged(caches):
    """One batch of the caches of single rows, as mlx-lm's BatchGenerator makes it."""
    return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]


class Row:
    """One sequence: its tokens, and what it was fed and gave in a batch."""

    def __init__(self, ids):
        self.ids, self.chunks, self.logits = ids, [], []

    def next(self, count):
        """The next tokens (count,)."""
        done = sum(self.chunks)
        assert done + count <= len(self.ids)
        self.chunks.append(count)
        return self.ids[done : done + count]

    def difference(self, model):
        """How far all that it gave is from what it gives alone, read in the same chunks."""
        alone, _ = feed(model, self.ids[None], [count for count in self.chunks if count])
        return difference(mx.concatenate(self.logits)[None], alone)


def step(model, cache, rows, counts):
    """One call: the next tokens of each row, padded on the right with a token of the model's."""
    width = max(counts)
    tokens = [mx.pad(row.next(n), (0, width - n)) for row, n in zip(rows, counts, strict=True)]
    logits = model(mx.stack(tokens), cache=cache)
    for row, n, given in zip(rows, counts, logits, strict=True):
        row.logits.append(given[:n])


def read_prompts(model, cache, rows, lengths, size):
    """Prompts side by side in chunks of ``size``, as BatchGenerator reads them."""
    padding = [max(lengths) - length for length in lengths]
    if max(padding):
        for layer in cache:
            layer.prepare(lengths=lengths, right_padding=padding)
    for start in range(0, max(lengths), size):
        width = min(size, max(lengths) - start)
        counts = [min(max(length - start, 0), width) for length in lengths]
        step(model, cache, rows, counts)
    if max(padding):
        for layer in cache:
            layer.finalize()


def decode(model, cache, rows, count):
    """``count`` further tokens of each row, one a call."""
    for _ in range(count):
        step(model, cache, rows, [1] * len(rows))
