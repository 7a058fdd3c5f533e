"""How much threadgroup memory a block of ``metal/tile/block.h`` takes."""

import mlx.core as mx


def block_bytes(rows: int, columns: int, dtype: mx.Dtype) -> int:
    """Bytes of a block on CUDA, where the launch says how much memory a threadgroup has.

    Args:
        rows: of the block.
        columns: elements of a row.
        dtype: of the elements.

    Returns:
        At least what ``Block<T, COLS>`` takes: some blocks do without the sixteen bytes a row.
    """
    return rows * (columns * dtype.size + 16)
