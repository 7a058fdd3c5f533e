"""How the keys of a cache are shared out when one query of each row reads them."""

from typing import NamedTuple

import mlx.core as mx

from .blocks import whole

#: elements of a threadgroup's queries, as registers allow
ELEMENTS = 320
#: of a threadgroup whose queries have so many elements at most, CUDA holds two at a time, or one
#: of a half more simdgroups (105 to 128 registers a thread, up to 254 with more elements)
FEW_ELEMENTS = 64
#: by backend, keys up to which one threadgroup goes through all: a second launch takes longer
ALONE = {"metal": 512, "cuda": 4096}
#: keys of a split at least; splits at most, so that joining them is short
SPLIT, MOST_SPLITS = 512, 64
#: by backend, threadgroups from which on more splits gain nothing (on CUDA of the larger kind)
ENOUGH = {"metal": 2048, "cuda": 128}


class Splits(NamedTuple):
    """``heads`` of queries and ``simdgroups`` of a threadgroup; its ``keys``; their ``count``."""

    heads: int
    simdgroups: int
    keys: int
    count: int

    def threads(self, B: int, H: int) -> dict[str, tuple[int, int, int]]:
        """``grid`` and ``threadgroup`` of a launch for B rows of H heads of queries."""
        size = self.simdgroups * 32
        return {"grid": (self.count * size, H // self.heads, B), "threadgroup": (size, 1, 1)}


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
    cuda = backend == "cuda"
    if keys <= ALONE[backend]:
        # one threadgroup for each head of queries has the most of a GPU (measured on an H200)
        heads = 1 if cuda else heads
        sizes = (4, 8, 12) if cuda and head_size <= FEW_ELEMENTS else (4, 8)
        simdgroups = next((n for n in sizes if 64 * n >= keys), sizes[-1])
        return Splits(heads, simdgroups, whole(keys, 32 * simdgroups), 1)
    simdgroups = 8
    enough = ENOUGH[backend] * (2 if cuda and heads * head_size <= FEW_ELEMENTS else 1)
    most = min(MOST_SPLITS, max(1, enough * heads // queries))
    each = max(SPLIT, whole(-(-keys // most), 32 * simdgroups))
    return Splits(heads, simdgroups, each, -(-keys // each))


def ahead(backend: str, dtype: mx.Dtype) -> bool:
    """Whether there are registers to ask for values before keys are used."""
    return backend == "cuda" and dtype.size == 2
