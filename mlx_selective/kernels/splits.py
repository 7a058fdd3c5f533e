"""How the keys of a cache are shared out when one query of each row reads them."""

import math
from typing import NamedTuple

#: simdgroups of a threadgroup; elements of all its queries, as registers allow
SIMDGROUPS, ELEMENTS = 4, 320
#: keys that one threadgroup goes through, and how many splits of them there are at most
SPLIT, MOST_SPLITS = 512, 64


class Splits(NamedTuple):
    """``heads`` of queries of a threadgroup; ``keys`` of a split, and the ``count`` of splits."""

    heads: int
    keys: int
    count: int


def share_keys(group: int, keys: int, head_size: int) -> Splits:
    """Splits for ``keys`` keys, each of which ``group`` query heads read.

    Args:
        group: H / Hkv.
        keys: N.
        head_size: D.
    """
    heads = next(n for n in (4, 2, 1) if group % n == 0 and (n == 1 or n * head_size <= ELEMENTS))
    step = 32 * SIMDGROUPS
    each = max(SPLIT, step * math.ceil(keys / MOST_SPLITS / step))
    return Splits(heads, each, math.ceil(keys / each))
