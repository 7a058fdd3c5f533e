"""How the keys of a cache are shared out when one query of each row reads them."""

from typing import NamedTuple

import mlx.core as mx

#: elements of a threadgroup's queries, as registers allow
ELEMENTS = 320
#: simdgroups of a threadgroup at most: each of its threads may need 255 registers on CUDA
SIMDGROUPS = 8
#: by backend, keys that one threadgroup goes through where no other takes part, and where some do
ALONE = {"metal": 512, "cuda": 1024}
SPLIT = {"metal": 512, "cuda": 512}
#: splits at most, so that joining them is short
MOST_SPLITS = 64


class Splits(NamedTuple):
    """``heads`` of queries and ``simdgroups`` of a threadgroup; its ``keys``; their ``count``."""

    heads: int
    simdgroups: int
    keys: int
    count: int


def share_keys(group: int, keys: int, head_size: int, backend: str) -> Splits:
    """Splits for ``keys`` keys, each of which ``group`` query heads read.

    Args:
        group: H / Hkv.
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
    each = max(SPLIT[backend], step * -(-keys // (MOST_SPLITS * step)))
    return Splits(heads, simdgroups, each, -(-keys // each))


def ahead(backend: str, dtype: mx.Dtype) -> bool:
    """Whether there are registers to ask for values before keys are used."""
    return backend == "cuda" and dtype.size == 2
