"""How the work of an attention kernel is cut: a threadgroup's blocks, and heads side by side."""

from functools import lru_cache
from typing import NamedTuple

#: bytes of keys and values that are read at about the same time, so that they stay in the GPU's
#: second-level cache (60 MB on an H200; from 32 to 128 MB was within 2 % there)
CACHE = 64 << 20


class Blocks(NamedTuple):
    """The sizes of a threadgroup's work.

    ``queries`` in all, ``rows`` for each simdgroup; ``keys`` in a block, with room for ``pairs``
    of blocks of keys and values; ``staged``: the queries wait in threadgroup memory, for want
    of registers.
    """

    queries: int
    keys: int
    rows: int
    pairs: int
    staged: bool = False


#: head sizes D that the attention kernels are written for
HEAD_SIZES = (64, 80, 96, 128)
#: on Metal, by head size: MLX's own sizes (steel_attention)
METAL = dict.fromkeys((64, 80, 96), Blocks(32, 32, 8, 1)) | {128: Blocks(32, 16, 8, 1)}


def whole(number: int, block: int) -> int:
    """The number in whole blocks, rounded up."""
    return -(-number // block) * block


def heads_together(heads: int, each: int) -> int:
    """How many heads to work at side by side, so that their keys and values stay in the cache.

    Args:
        heads: B times H.
        each: bytes of the keys and values of one head.

    Returns:
        A divisor of heads.
    """
    return _largest_divisor(heads, CACHE // each)


@lru_cache(maxsize=256)
def _largest_divisor(heads: int, most: int) -> int:
    # CUDA counts 65535 groups of heads
    divisors = [n for n in range(1, heads + 1) if heads % n == 0 and heads // n < 2**16]
    return max((n for n in divisors if n <= most), default=divisors[0])
