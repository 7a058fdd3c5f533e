"""Long sequences in blocks of queries, forward and backward, one block after another."""

from collections.abc import Callable

import mlx.core as mx

#: Queries per block. Logits exist for one block at a time, never for all queries.
QUERY_BLOCK = 128


def query_blocks(queries: int, keys: int, block_size: int) -> list[tuple[int, int, int]]:
    """Cuts the queries into blocks: (first query, end, number of keys the block can reach).

    The queries' own keys are the last ``queries`` of the ``keys``, in order, so a block that
    ends at query e never looks beyond key ``keys - queries + e``.

    Raises:
        ValueError: if block_size is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}.")
    blocks = []
    for start in range(0, queries, block_size):
        end = min(start + block_size, queries)
        blocks.append((start, end, keys - queries + end))
    return blocks


def scan_queries(
    block: Callable[..., list[mx.array]],
    carry: mx.array,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    block_size: int,
) -> list[mx.array]:
    """Runs an attention block by block, so that only one block's logits exist at a time.

    MLX evaluates independent work side by side; each block here waits for the one before it.
    The backward pass goes through the blocks from the last to the first and computes each
    again from its carry.

    Args:
        block: ``block(carry, q, k, v, start)`` for the queries from ``start`` on, with the
            keys they can reach; returns a new carry and outputs with queries on axis 2.
        carry: what a block hands to the next.
        q, k, v: (B, H, T, D), (B, Hkv, N, D), (B, Hkv, N, Dv).
        block_size: queries per block.

    Returns:
        The last carry, and the outputs of all blocks, joined.
    """
    blocks = query_blocks(q.shape[2], k.shape[2], block_size)
    if len(blocks) == 1:
        return block(carry, q, k, v, 0)

    @mx.custom_function
    def run(carry, q, k, v):
        carries, parts = [], []
        for start, end, reach in blocks:
            queries = q[:, :, start:end]
            if parts:
                queries = mx.depends(queries, parts[-1])
            carries.append(carry)
            carry, *outputs = block(carry, queries, k[:, :, :reach], v[:, :, :reach], start)
            parts.append(outputs)
        joined = [mx.concatenate(part, axis=2) for part in zip(*parts, strict=True)]
        return [carry, *joined, *carries]

    @run.vjp
    def run_backward(primals, cotangents, outputs):
        return _backward(block, blocks, primals, cotangents, outputs[-len(blocks) :])

    return run(carry, q, k, v)[: -len(blocks)]


def _backward(block, blocks, primals, cotangents, carries):
    """Gradients of scan_queries: each block is computed again, the last one first."""
    _, q, k, v = primals
    d_carry, *d_outputs = cotangents[: -len(blocks)]
    d_q, d_k, d_v = [], mx.zeros_like(k), mx.zeros_like(v)
    for (start, end, reach), carry in zip(reversed(blocks), reversed(carries), strict=True):
        arguments = [carry, q[:, :, start:end], k[:, :, :reach], v[:, :, :reach]]
        _, gradients = mx.vjp(
            lambda *arguments, start=start: block(*arguments, start),
            mx.depends(arguments, [d_carry, d_k, d_v]),
            [d_carry, *(d[:, :, start:end] for d in d_outputs)],
        )
        d_carry = gradients[0]
        d_q.append(gradients[1])
        d_k = d_k.at[:, :, :reach].add(gradients[2])
        d_v = d_v.at[:, :, :reach].add(gradients[3])
    return [d_carry, mx.concatenate(d_q[::-1], axis=2), d_k, d_v]
