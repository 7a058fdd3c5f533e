"""Whether caches that were read from a file are such as a model can have left behind."""

from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .prompt import make_prompt_cache
from .pruned import MIN_BUDGET, PrunedKVCache


def fits_model(caches: list[Any], model: nn.Module) -> bool:
    """Whether caches have the types and shapes of a model's, and have all read as many tokens.

    Args:
        caches: one a layer, perhaps from a file.
        model: whose caches they would be.
    """
    fresh = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=fresh)  # computes nothing, but gives the shapes
    offsets = {str(cache.offset) for cache in caches if hasattr(cache, "offset")}
    return len(fresh) == len(caches) and len(offsets) < 2 and all(map(_fits, caches, fresh))


def _fits(held: Any, fresh: Any) -> bool:
    """Whether two caches are of one kind, with as many rows and heads of one size."""
    if isinstance(held, QuantizedKVCache):
        return isinstance(fresh, KVCache)
    if isinstance(held, PrunedKVCache) and not is_whole(held):
        return False
    return type(held) is type(fresh) and _shapes(held) == _shapes(fresh)


def _shapes(cache: Any) -> list[tuple[int, ...]]:
    """The shapes of the keys and values (B, Hkv, tokens, D) of a cache, without the tokens."""
    arrays = [leaf for _, leaf in tree_flatten(cache.state) if isinstance(leaf, mx.array)]
    return [(*array.shape[:2], array.shape[3]) for array in arrays if array.ndim == 4]


def is_whole(cache: PrunedKVCache) -> bool:
    """Whether all parts of a cache agree: shapes, counts, positions, F and the empty slot.

    Args:
        cache: between two calls of its layer, with whatever arrays a file gave it.
    """
    budget_ok = cache.budget is None or cache.budget >= MIN_BUDGET
    if len(cache.offsets) != len(cache.kept) or not budget_ok:
        return False
    arrays = (cache.keys, cache.values, cache.positions, cache.F)
    if all(array is None for array in arrays):
        return not any(cache.kept)
    if any(array is None for array in arrays):
        return False
    rows, slots = len(cache.offsets), cache.keys.shape[2] if cache.keys.ndim == 4 else -1
    return (
        cache.keys.shape[:3] == cache.values.shape[:3]
        and (cache.keys.shape[0], slots) == (rows, cache.positions.shape[-1])
        and cache.positions.shape == cache.F.shape == (rows, slots)
        and (cache.positions.dtype, cache.F.dtype) == (mx.int32, mx.float32)
        and _rows_are_whole(cache)
        and _hole_is_empty(cache)
    )


def _rows_are_whole(cache):
    """Each row keeps as many different positions as it says, its first and newest among them."""
    F = np.array(cache.F)
    if not (np.isfinite(F).all() and (F >= 0).all()):
        return False
    rows = zip(np.array(cache.positions), cache.offsets, cache.kept, strict=True)
    for positions, offset, kept in rows:
        held = sorted(position for position in positions.tolist() if position >= 0)
        ends = [] if offset <= 0 else [0, offset - 1]
        if len(held) != kept or not {*ends} <= {*held} or kept > (cache.budget or kept):
            return False
        if any(one == other for one, other in pairwise(held)) or held[-1:] > ends[-1:]:
            return False
    return True


def _hole_is_empty(cache):
    """The slot that the next token takes is there, and nobody's."""
    if cache.hole is None:
        return True
    if cache.hole.shape != (len(cache.offsets), 1):
        return False
    hole = np.array(cache.hole)[:, 0]
    if not ((hole >= 0) & (hole < cache.positions.shape[1])).all():
        return False
    return bool((np.array(cache.positions)[np.arange(len(hole)), hole] < 0).all())
