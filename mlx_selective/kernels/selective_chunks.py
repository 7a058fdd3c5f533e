"""Which queries of a prompt share a mask, so that masks take little beside inputs and output."""

from functools import lru_cache
from typing import NamedTuple

from .blocks import Blocks, whole

#: A mask of all queries takes at most this share of the bytes of queries, keys, values and output;
#: beyond that they come in chunks, of which two have a mask of at most MASK_SHARE / 4.
MASK_SHARE = 1 / 2
#: as many threadgroups the last chunk should have, whatever its mask takes: about two a core
THREADGROUPS = 256


class Chunk(NamedTuple):
    """The ``rows`` queries from ``start`` on, which see keys before ``width``, in whole blocks."""

    start: int
    rows: int
    width: int


@lru_cache(maxsize=256)
def share_queries(
    B: int, H: int, T: int, N: int, nbytes: int, size: int, blocks: Blocks
) -> tuple[int, list[Chunk]]:
    """Chunks whose masks are about equally large: later queries see more keys and are fewer.

    Args:
        B: rows of the batch.
        H: heads.
        T: queries.
        N: keys, the last T of them the queries' own.
        nbytes: of queries and keys; values and output take as many.
        size: bytes of an element of the mask.
        blocks: of the attention kernel.

    Returns:
        Elements of the largest mask, and the chunks.
    """
    share = min(2 * nbytes * MASK_SHARE / size, 2**31 - 1)
    if B * T * whole(N, blocks.keys) <= share:
        return cut_queries(B, T, N, whole(T, blocks.queries), blocks)
    # beside F at the start of each block, twice
    share = max(0, share - 8 * B * whole(N, blocks.keys) * -(-T // blocks.queries) / size)
    least = blocks.queries * -(-THREADGROUPS // (B * H))
    most = min(max(share / 4, B * least * whole(N, blocks.keys)), 2**31 - 1)
    count = len(_fill(B, T, N, most, blocks))
    # No chunk much smaller than the others: the smallest limit that takes no more of them.
    for step in range(1, 65):
        chunks = _fill(B, T, N, most * step / 64, blocks)
        if len(chunks) <= count:
            break
    return _room(B, chunks), chunks


def cut_queries(B: int, T: int, N: int, rows: int, blocks: Blocks) -> tuple[int, list[Chunk]]:
    """The same, in chunks of ``rows`` queries, a multiple of the blocks' queries."""
    chunks = []
    for start in range(0, T, rows):
        count = min(rows, T - start)
        chunks.append(Chunk(start, count, whole(N - T + start + count, blocks.keys)))
    return _room(B, chunks), chunks


def _fill(B, T, N, most, blocks) -> list[Chunk]:
    """Each chunk as large as its mask may be, and a block of queries at least."""
    chunks, start = [], 0
    while start < T:
        rows = blocks.queries
        while rows < T - start:
            more = rows + blocks.queries
            if B * more * whole(N - T + start + more, blocks.keys) > most:
                break
            rows = more
        rows = min(rows, T - start)
        chunks.append(Chunk(start, rows, whole(N - T + start + rows, blocks.keys)))
        start += rows
    return chunks


def _room(B: int, chunks: list[Chunk]) -> int:
    return B * max(chunk.rows * chunk.width for chunk in chunks)
