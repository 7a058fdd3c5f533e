"""Every kernel with what `mlx-selective doctor --kernels` needs to check and time it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..attention.blocks import QUERY_BLOCK
from ..attention.selective.definition import plain_selective
from ..attention.ssa.definition import multiply_rows
from ..attention.stick_breaking.definition import plain_stick_breaking
from ..kernels import (
    causal_attention,
    selective_decode,
    ssa,
    stick_breaking,
    stick_breaking_decode,
    tile_words,
)
from ..kernels import selective as selective_prompt
from ..kernels.choice import FLOATS
from . import definitions
from .definitions import attend, logits, selected, selective, softmax


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
        parts: the functions in ``metal/`` that take part, where they are others than the name.
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
    parts: tuple[str, ...] = ()

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


def _with_lower_logits(rng, shape, dtype, by=4):
    """The same with ``by`` taken from each logit, so that something is left of every stick."""
    q, k, v = _queries_keys_values(rng, shape, dtype)
    q = mx.concatenate([mx.ones_like(q[..., :1]), q[..., 1:]], axis=-1)
    lower = mx.full(k[..., :1].shape, -by / _scale(q), dtype)
    return [q, mx.concatenate([lower, k[..., 1:]], axis=-1), v]


def _three_matrices(rng, shape, dtype):
    shapes = [(rows, shape[-1]) for rows in (tile_words.ROWS, *[tile_words.COLUMNS] * 2)]
    return [mx.array(rng.standard_normal(s).astype(np.float32)).astype(dtype) for s in shapes]


def _scale(q) -> float:
    return q.shape[-1] ** -0.5


def _cached_keys(rng, shape, dtype):
    """Queries, keys and values as above, and what earlier queries left on the earlier keys."""
    q, k, v = _queries_keys_values(rng, shape, dtype)
    return [q, k, v, _left_on(rng, k, k.shape[2] - q.shape[2])]


def _one_query(rng, shape, dtype):
    """One query over keys of which a cache has more."""
    q, k, v = _queries_keys_values(rng, shape, dtype)
    k, v = k[:, :, : shape[2]], v[:, :, : shape[2]]
    return [q[:, :, :1], k, v, _left_on(rng, k, shape[2] - 1)]


def _one_stick(rng, shape, dtype):
    """One query over many keys, each of which takes little."""
    q, k, v = _with_lower_logits(rng, shape, dtype, by=8)
    return [q[:, :, :1], k[:, :, : shape[2]], v[:, :, : shape[2]]]


def _left_on(rng, k, earlier):
    F = rng.uniform(0, 3, (k.shape[0], k.shape[2])).astype(np.float32)
    F[:, 0] = F[:, earlier:] = 0
    return mx.array(F)


def _positions(q, k) -> dict[str, mx.array]:
    """Keys in order, the queries' own the last."""
    B, T, N = q.shape[0], q.shape[2], k.shape[2]
    keys = mx.broadcast_to(mx.arange(N), (B, N))
    return {"scale": _scale(q), "key_positions": keys, "query_positions": keys[:, N - T :]}


def _selective(q, k, v, F, chunk=None):
    settings = {"definition": None, "remaining": True, "chunk": chunk}
    return selective_prompt.selective(q, k, v, F, **settings, **_positions(q, k))


def _plain_selective(q, k, v, F):
    settings = {"remaining": True, "documents": None, "block_size": QUERY_BLOCK}
    return plain_selective(q, k, v, F, **settings, **_positions(q, k))


def _true_selective(q, k, v, F):
    z = logits(q, k, _scale(q))
    S, T, N = selected(z), q.shape[2], k.shape[2]
    rows = F[:, None] + np.cumsum(S, axis=1) - S
    needed = np.tril(1 - np.minimum(rows, 1), N - T).sum(-1)
    output = attend(lambda z: selective(z, F[:, None]), q, k, v, _scale(q))
    return [output, F + S.sum(1), needed]


def _selective_step(q, k, v, F):
    found = selective_decode.selective_decode(
        q, k, v, F, evicts=[1] * len(F), definition=_plain_step, **_positions(q, k)
    )
    return found and [*found[:2], found[2].astype(mx.float32)]


def _plain_step(q, k, v, F):
    output, F, _ = _plain_selective(q, k, v, F)
    # the first key and the newest stay
    slot = mx.argmax(F[:, 1:-1], axis=1, keepdims=True) + 1
    return [output, F, slot.astype(mx.float32)]


def _true_step(q, k, v, F):
    output, F, _ = _true_selective(q, k, v, F)
    return [output, F, F[:, 1:-1].argmax(1)[:, None] + 1.0]


def _true_stick_breaking(q, k, v):
    output = attend(definitions.stick_breaking, q, k, v, _scale(q))
    return [output, definitions.remainder(logits(q, k, _scale(q)))]


def _stick_breaking(q, k, v):
    return stick_breaking.stick_breaking(q, k, v, scale=_scale(q), definition=plain_stick_breaking)


_SELECTIVE = KernelCheck(
    name="selective",
    head_sizes=selective_prompt.HEAD_SIZES,
    checked=(2, 4, 77),
    timed=(1, 16, 2048),
    arguments=_cached_keys,
    kernel=_selective,
    plain=_plain_selective,
    truth=_true_selective,
    results=("output", "F", "remaining"),
    parts=("selective_sums", "selective_mask", "selective_attention"),
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
    _SELECTIVE,
    # the third chunk's mask goes where the first one's was
    replace(
        _SELECTIVE,
        name="selective_chunks",
        head_sizes=(64,),
        checked=(2, 4, 300),
        kernel=lambda q, k, v, F: _selective(q, k, v, F, chunk=128),
    ),
    KernelCheck(
        name="selective_decode",
        head_sizes=selective_decode.HEAD_SIZES,
        checked=(2, 4, 777),
        timed=(1, 16, 4096),
        arguments=_one_query,
        kernel=_selective_step,
        plain=_plain_step,
        truth=_true_step,
        results=("output", "F", "slot"),
        parts=("selective_decode", "selective_decode_split", "selective_combine"),
    ),
    KernelCheck(
        name="stick_breaking_attention",
        head_sizes=stick_breaking.HEAD_SIZES,
        checked=(2, 4, 77),
        timed=(1, 16, 2048),
        arguments=_with_lower_logits,
        kernel=_stick_breaking,
        plain=lambda q, k, v: plain_stick_breaking(q, k, v, scale=_scale(q), attend_current=False),
        truth=_true_stick_breaking,
        results=("output", "remainder"),
    ),
    KernelCheck(
        name="stick_breaking_decode",
        head_sizes=stick_breaking_decode.HEAD_SIZES,
        checked=(2, 4, 777),
        timed=(1, 16, 4096),
        arguments=_one_stick,
        kernel=lambda q, k, v: stick_breaking_decode.stick_breaking_decode(
            q, k, v, scale=_scale(q), attend_current=False, definition=None
        ),
        plain=lambda q, k, v: plain_stick_breaking(q, k, v, scale=_scale(q), attend_current=False),
        truth=_true_stick_breaking,
        results=("output", "remainder"),
        parts=("stick_breaking_decode", "stick_breaking_decode_split", "stick_breaking_combine"),
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
