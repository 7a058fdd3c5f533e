"""Every kernel with what `mlx-selective doctor --kernels` needs to check and time it."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..attention.ssa.definition import multiply_rows
from ..attention.stick_breaking.definition import stick_breaking_attention
from ..kernels import causal_attention, ssa, stick_breaking, tile_words
from ..kernels.choice import FLOATS
from . import definitions
from .definitions import attend, softmax


@dataclass(frozen=True)
class KernelCheck:
    """One kernel, beside plain MLX and NumPy.

    Args:
        name: of the kernel.
        head_sizes: D, each checked in float32, float16 and bfloat16.
        checked: (B, H, T) of the comparison with NumPy, small and uneven.
        timed: (B, H, T) of the timing, as in a model.
        arguments: ``arguments(rng, shape, dtype)`` for a shape (B, H, T, D); MLX arrays.
        kernel: of those arguments; an array or a list of some, or None where no kernel applies.
        plain: the same in plain MLX.
        truth: the same of NumPy arrays in float64.
        results: what the results are called, where there are several.
    """

    name: str
    head_sizes: tuple[int, ...]
    checked: tuple[int, int, int]
    timed: tuple[int, int, int]
    arguments: Callable
    kernel: Callable
    plain: Callable
    truth: Callable
    results: tuple[str, ...] = ("",)

    def cases(self) -> list[tuple[mx.Dtype, int]]:
        """The dtypes and head sizes to check."""
        return [(dtype, size) for size in self.head_sizes for dtype in FLOATS]


def _rows_and_temperatures(rng, shape, dtype):
    B, H, T, D = shape
    # as projections come: tokens before heads in memory
    x = mx.array(rng.standard_normal((B, T, H, D)).astype(np.float32)).astype(dtype)
    return [x.swapaxes(1, 2), mx.array(rng.uniform(0.5, 2, (B, H, T, 1)).astype(np.float32))]


def _queries_keys_values(rng, shape, dtype):
    """Two queries' heads for each head of keys, and some keys before the first query's."""
    B, H, T, D = shape
    shapes = (shape, *[(B, H // 2, T + 19, D)] * 2)
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def _with_lower_logits(rng, shape, dtype):
    """The same with 4 taken from each logit, so that something is left of every stick."""
    q, k, v = _queries_keys_values(rng, shape, dtype)
    q = mx.concatenate([mx.ones_like(q[..., :1]), q[..., 1:]], axis=-1)
    lower = mx.full(k[..., :1].shape, -4 / _scale(q), dtype)
    return [q, mx.concatenate([lower, k[..., 1:]], axis=-1), v]


def _three_matrices(rng, shape, dtype):
    shapes = [(rows, shape[-1]) for rows in (tile_words.ROWS, *[tile_words.COLUMNS] * 2)]
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def _scale(q) -> float:
    return q.shape[-1] ** -0.5


def _stick_breaking(q, k, v):
    return stick_breaking.stick_breaking(
        q, k, v, scale=_scale(q), definition=stick_breaking_attention
    )


CHECKS = (
    KernelCheck(
        name="tile_words",
        head_sizes=(tile_words.DEPTH,),
        checked=(1, 1, tile_words.ROWS),
        timed=(1, 1, tile_words.ROWS),
        arguments=_three_matrices,
        kernel=tile_words.tile_words,
        plain=tile_words.plain_tile_words,
        truth=tile_words.true_tile_words,
        results=tile_words.NAMES,
    ),
    KernelCheck(
        name="causal_attention",
        head_sizes=causal_attention.HEAD_SIZES,
        checked=(2, 4, 77),
        timed=(1, 16, 2048),
        arguments=_queries_keys_values,
        kernel=lambda q, k, v: causal_attention.causal_attention(q, k, v, scale=_scale(q)),
        plain=lambda q, k, v: mx.fast.scaled_dot_product_attention(
            q, k, v, scale=_scale(q), mask="causal"
        ),
        truth=lambda q, k, v: attend(softmax, q, k, v, _scale(q)),
    ),
    KernelCheck(
        name="stick_breaking_attention",
        head_sizes=stick_breaking.HEAD_SIZES,
        checked=(2, 4, 77),
        timed=(1, 16, 2048),
        arguments=_with_lower_logits,
        kernel=_stick_breaking,
        plain=lambda q, k, v: stick_breaking_attention(q, k, v, scale=_scale(q)),
        truth=lambda q, k, v: [
            attend(definitions.stick_breaking, q, k, v, _scale(q)),
            definitions.remainder(definitions.logits(q, k, _scale(q))),
        ],
        results=("output", "remainder"),
    ),
    KernelCheck(
        name="ssa_temperature",
        head_sizes=ssa.HEAD_SIZES,
        checked=(2, 3, 37),
        timed=(1, 16, 2048),
        arguments=_rows_and_temperatures,
        kernel=lambda x, tau: ssa.ssa_temperature(x, tau, multiply_rows, smallest=0),
        plain=multiply_rows,
        truth=lambda x, tau: x * tau,
    ),
)
