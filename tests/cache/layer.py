"""A layer of selective attention around a cache, as the tests of the cache need it."""

import mlx.core as mx
import numpy as np

from mlx_selective.attention.selective.layer import Selective, SelectiveCall

SCALE = 0.6


def attend(cache, q, k, v):
    """One call of the layer: new tokens (B, heads, T, D) in, output (B, H, T, D) out."""
    x = q.swapaxes(1, 2)  # only its length counts
    call = SelectiveCall(Selective(), None, x, cache)
    return call.attend(q, *call.update_and_fetch(k, v), SCALE)


def run(cache, q, k, v, chunks, fed=None):
    """Feeds a sequence in chunks; returns all outputs.

    ``fed`` is where in q, k and v the next tokens stand; by default at the cache's offset.
    """
    outputs, start = [], cache.offset if fed is None else fed
    for chunk in chunks:
        outputs.append(attend(cache, *(a[:, :, start : start + chunk] for a in (q, k, v))))
        start += chunk
    return mx.concatenate(outputs, axis=2)


def kept_in_row(cache, row):
    """Kept positions of a row in order, with their F, keys and values."""
    held = np.array(cache.positions)[row]
    slots = [slot for slot in np.argsort(held) if held[slot] >= 0]
    keys, values = np.array(cache.keys)[row], np.array(cache.values)[row]
    return held[slots], np.array(cache.F)[row, slots], keys[:, slots], values[:, slots]


def kept(cache):
    """kept_in_row for all rows, which must keep equally many."""
    rows = [kept_in_row(cache, row) for row in range(len(cache.kept))]
    return [np.stack(part) for part in zip(*rows, strict=True)]
