"""Every word of the tile vocabulary once, so that a machine can be checked word by word.

A kernel that is wrong tells little; this tells which word of ``metal/tile`` is not what it is
taken for, first of all where a matrix fragment's elements live.
"""

import mlx.core as mx
import numpy as np

from .kernel import Kernel
from .signature import constants
from .threadgroup_memory import block_bytes

_KERNEL = Kernel("check/tile_words.metal")
#: the tiles' sizes: rows, columns, depth
ROWS, COLUMNS, DEPTH = 32, 32, 64
#: rows of ``a`` that count; the rest must be taken as zero
VALID_ROWS = 27
#: the results, in order
NAMES = (
    "coordinates",
    "product",
    "staged_product",
    "largest",
    "row_sum",
    "reverse_sum",
    "column_sum",
    "reverse_product",
    "weighted",
)


def tile_words(a: mx.array, b: mx.array, v: mx.array) -> list[mx.array]:
    """What each word makes of three small matrices, by ``metal/check/tile_words.metal``.

    Args:
        a: (32, 64), float32, float16 or bfloat16; the last five rows are taken as zero.
        b: (32, 64), of the same dtype.
        v: (32, 64), of the same dtype.

    Returns:
        ``coordinates`` 100 row + column, ``product`` a b^T and ``staged_product`` the same by
        another way, ``largest`` of its rows, its running sums ``row_sum``, ``reverse_sum`` and
        ``column_sum``, which start at 1, the running ``reverse_product`` of 1 + product / 256,
        all float32, (32, 32) or (32,); ``weighted`` a plus product v, (32, 64) in a's dtype.

    Raises:
        KernelError: if no backend runs kernels here, or dtypes differ.
    """
    square = (ROWS, COLUMNS)
    shapes = [square, square, square, (ROWS,), *[square] * 4, (ROWS, DEPTH)]
    return _KERNEL(
        inputs=[a, b, v, constants([VALID_ROWS], mx.int32)],
        template={"T": a.dtype, "R": ROWS, "C": COLUMNS, "K": DEPTH},
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=shapes,
        output_dtypes=[mx.float32] * 8 + [a.dtype],
        shared_memory=block_bytes(ROWS + COLUMNS, DEPTH, a.dtype),
    )


def plain_tile_words(a: mx.array, b: mx.array, v: mx.array) -> list[mx.array]:
    """The same in plain MLX, sums in float32.

    Args:
        a: (32, 64), as for :func:`tile_words`.
        b: (32, 64).
        v: (32, 64).

    Returns:
        The nine results of :func:`tile_words`.
    """
    valid = (mx.arange(ROWS) < VALID_ROWS)[:, None]
    product = (a.astype(mx.float32) * valid) @ b.astype(mx.float32).T
    results = _words(mx, product)
    return [*results, (product.astype(a.dtype) @ v + a * valid).astype(a.dtype)]


def true_tile_words(a: np.ndarray, b: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    """The same in NumPy.

    Args:
        a: (32, 64), float64.
        b: (32, 64), float64.
        v: (32, 64), float64.

    Returns:
        The nine results of :func:`tile_words`, float64.
    """
    a = a * (np.arange(ROWS) < VALID_ROWS)[:, None]
    product = a @ b.T
    return [*_words(np, product), a + product @ v]


def _words(library, product) -> list:
    """From mlx.core or numpy, which spell these the same way."""
    rows, columns = library.arange(ROWS)[:, None], library.arange(COLUMNS)[None]
    return [
        (100 * rows + columns) * library.ones_like(product),
        product,
        product,
        product.max(axis=1),
        1 + library.cumsum(product, axis=1),
        1 + library.cumsum(product[:, ::-1], axis=1)[:, ::-1],
        1 + library.cumsum(product, axis=0),
        library.cumprod((1 + product / 256)[:, ::-1], axis=1)[:, ::-1],
    ]
