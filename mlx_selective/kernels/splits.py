"""How the keys of a cache are shared out when one query of each row reads them."""

from typing import NamedTuple

import mlx.core as mx

#: elements of a threadgroup's queries, as registers allow
ELEMENTS = 320
#: simdgroups of a threadgroup at most: each of its threads may need 255 registers on CUDA
SIMDGROUPS = 8
#: by backend, keys up to which one threadgroup goes through all: a second launch takes longer
ALONE = {"metal": 512, "cuda": 4096}
#: keys of a split at least; splits at most, so that joining them is short
SPLIT, MOST_SPLITS = 512, 64
#: by backend, threadgroups from which on more splits gain nothing
ENOUGH = {"metal": 2048, "cuda": 128}


class Splits(NamedTuple):
    """``heads`` of queries and ``simdgroups`` of a threadgroup; its ``keys``; their ``count``."""

    heads: int
    simdgroups: int
    keys: int
    count: int


def share_keys(group: int, queries: int, keys: int, head_size: int, backend: str) -> Splits:
    """Splits for ``keys`` keys, each of which ``group`` query heads read.

    Args:
        group: H / Hkv.
        queries: B times H.
        keys: N.
        head_size: D.
        backend: that the kernel runs on.
    """
    heads = next(n for n in (4, 2, 1) if group % n == 0 and (n == 1 or n * head_size <= ELEMENTS))
    simdgroups = 4
    while simdgroups < SIMDGROUPS and 64 * simdgroups < keys:
        simdgroups *= 2
    step = 32 * simdgroups
    if keys <= ALONE[backend]:
        return Splits(heads, simdgroups, -(-keys // step) * step, 1)
    most = min(MOST_SPLITS, max(1, ENOUGH[backend] * heads // queries))
    each = max(SPLIT, step * -(-keys // (most * step)))
    return Splits(heads, simdgroups, each, -(-keys // each))


def ahead(backend: str, dtype: mx.Dtype) -> bool:
    """Whether there are registers to ask for values before keys are used."""
    return backend == "cuda" and dtype.size == 2
