"""Closed formulas of the work of attention kernels, from their block sizes."""

from dataclasses import dataclass

import numpy as np

from .mlx_attention import WM, Problem, steel_blocks


@dataclass(frozen=True)
class Visits:
    """The blocks of keys that the blocks of queries of all heads go through."""

    bq: int
    bk: int
    heads: int  # B H
    blocks: int  # of keys, one for each block of queries that goes through it
    rows: int  # of keys in them, without those beyond the last
    groups: int  # threadgroups
    cells: int  # of the matrix of logits in those blocks, within T x N


def visits(problem: Problem) -> Visits:
    """Under causal masks, those with a key that one of the block's queries sees."""
    B, H, _, T, N, D = problem.shape()
    bq, bk = steel_blocks(D)
    count = -(-T // bq)
    ends = [N if not problem.causal else min(N, (i + 1) * bq + N - T) for i in range(count)]
    blocks = [-(-end // bk) for end in ends]
    rows = [min(N, n * bk) for n in blocks]
    queries = [min(bq, T - i * bq) for i in range(count)]
    cells = sum(r * q for r, q in zip(rows, queries, strict=True))
    return Visits(
        bq, bk, B * H, B * H * sum(blocks), B * H * sum(rows), B * H * count, B * H * cells
    )


def steel_counts(problem: Problem, wn: int = 1, lse: bool = False) -> dict[str, object]:
    """What the report of steel_attention tells."""
    B, H, _, T, N, D = problem.shape()
    at, size, threads = visits(problem), problem.q.dtype.size, 32 * WM * wn
    additive = problem.mask is not None and problem.mask.dtype == problem.q.dtype
    fragments = at.bk // 8
    pad = 16 // size
    in_registers = wn == 2 and (at.bk == 32 or size == 4)
    block = max((at.bk + pad) * D, at.bk * (D + pad))
    staged = 0 if in_registers else at.groups * at.bq * D  # queries, in elements
    exchanged = 4 * 2 * fragments * threads * at.blocks if wn == 2 else 0
    read = {"Q": B * H * T * D * size, "K": at.rows * D * size, "V": at.rows * D * size}
    if problem.mask is not None:
        read["mask"] = at.cells * problem.mask.dtype.size * wn
    if problem.sinks is not None:
        read["sinks"] = at.groups * threads * size
    written = {"O": B * H * T * D * size}
    if lse:
        written["lse"] = B * H * T * 4
    return {
        # products; the sum's rescaling in each lane, and the mask brought to base 2
        "multiply_accumulates": at.blocks
        * (at.bq * at.bk * 2 * D + threads * (1 + 2 * fragments * additive)),
        "special_functions": at.blocks * threads * (2 * fragments + 1) + B * H * T * lse,
        "barriers": 2 * at.groups + (4 + 2 * (wn - 1)) * at.blocks,
        # a product of fragments; two shuffles for a fragment's maximum and two for its sum
        "simd_operations": at.blocks * WM * fragments * (2 * D // 8 + 4 * wn),
        "device_read": read,
        "device_written": written,
        "threadgroup_written": size * (staged + 2 * at.blocks * at.bk * D) + exchanged,
        "threadgroup_read": size
        * at.blocks
        * (2 * WM * at.bk * D + (0 if in_registers else at.bq * D))
        + exchanged,
        "threadgroup_memory": size * (block + (1 if in_registers else at.bq * (D + pad))),
    }


def own_counts(problem: Problem) -> dict[str, object]:
    """What the report of metal/attention/causal.metal tells; its blocks are steel_attention's."""
    B, H, _, T, N, D = problem.shape()
    at, size = visits(problem), problem.q.dtype.size
    queries = B * H * T * D * size
    return {
        # products; for each logit the argument of its exponential
        "multiply_accumulates": at.blocks * at.bq * at.bk * (2 * D + 1),
        # its weight; and once for each lane where the first block sets the scale, which others keep
        "special_functions": at.blocks * at.bq * at.bk + at.groups * 32 * WM,
        "barriers": 2 * at.blocks,
        "device_read": {"q": queries, "k": at.rows * D * size, "v": at.rows * D * size},
        "device_written": {"out": queries},
        "threadgroup_written": 2 * at.blocks * at.bk * D * size,
        "threadgroup_read": 2 * at.blocks * WM * at.bk * D * size,
        "threadgroup_memory": 2 * at.bk * (D * size + 16),
    }


def used_keys(problem: Problem) -> np.ndarray:
    """Which keys sdpa_vector multiplies with, (B H, T, N)."""
    B, H, _, T, N, _ = problem.shape()
    used = np.ones((B, H, T, N), bool)
    if problem.causal:
        used &= np.tri(T, N, N - T, dtype=bool)
    elif problem.mask is not None:
        boolean = problem.mask.dtype.size == 1
        used &= np.array(problem.mask if boolean else problem.mask > -float("inf"))
    return used.reshape(B * H, T, N)


def vector_counts(problem: Problem) -> dict[str, object]:
    """What the report of sdpa_vector tells: a threadgroup of 32 simdgroups for each query."""
    B, H, _, T, N, D = problem.shape()
    Dv, size = problem.v.shape[3], problem.q.dtype.size
    groups, used = B * H * T, int(used_keys(problem).sum())
    values = Dv // 32  # of a lane
    read = {"queries": 32 * groups * D * size, "keys": used * D * size, "values": used * Dv * size}
    if problem.mask is not None:  # each lane for itself
        if problem.mask.dtype.size == 1:
            read["bmask"] = 32 * groups * N
        else:
            read["fmask"] = 32 * (groups * N + used) * size
    if problem.sinks is not None:
        read["sinks"] = 32 * groups * size
    return {
        "multiply_accumulates": used * (D + Dv + 32),
        "special_functions": 64 * used + 1024 * groups,
        "barriers": groups * (1 + 2 * values),
        "simd_operations": used + 32 * groups * (2 + values),
        "device_read": read,
        "device_written": {"out": groups * Dv * size},
        "threadgroup_written": groups * 4 * (64 + 1024 * values),
        "threadgroup_read": groups * 4 * (2048 + 1024 * values),
        "threadgroup_memory": 4 * (1024 + 64),
    }


def two_pass_counts(problem: Problem, blocks: int, tokens: int = 4) -> list[dict[str, object]]:
    """What the reports of sdpa_vector_2pass_1 and _2 tell, without masks but causal ones."""
    B, H, _, T, N, D = problem.shape()
    Dv, size = problem.v.shape[3], problem.q.dtype.size
    rows, used = B * H * T, used_keys(problem)
    # whole sets of `tokens` keys of a block are fetched before it is known whether they count
    position = np.arange(N)
    together = -(-(N - position % blocks) // blocks) // tokens * tokens
    fetched = int((used | (position // blocks < together)).sum())
    used, steps = int(used.sum()), blocks // 32
    first = {
        "multiply_accumulates": used * (D + Dv + 32),
        "special_functions": 64 * used,
        "barriers": 0,
        "simd_operations": used,
        "device_read": {
            "queries": rows * blocks * D * size,
            "keys": fetched * D * size,
            "values": fetched * Dv * size,
        },
        "device_written": {
            "out": rows * blocks * Dv * size,
            "sums": rows * blocks * 4,
            "maxs": rows * blocks * 4,
        },
        "threadgroup_memory": 0,
    }
    values = Dv // 32
    second = {
        "multiply_accumulates": rows * steps * 1024 * (1 + values),
        "special_functions": rows * steps * 1024 * 2,
        "barriers": rows * 2 * values,
        "simd_operations": rows * 32 * (2 + values),
        "device_read": {
            "partials": rows * blocks * Dv * size,
            "sums": rows * steps * 4096,
            "maxs": rows * steps * 3 * 4096,
        },
        "device_written": {"out": rows * Dv * size},
        "threadgroup_memory": 4096,
    }
    return [first, second]
