"""The memory loss of selective attention, and what training asks of each layer for it.

Leviathan et al., arXiv 2410.02703: beside the loss of the words, how many keys the layers still
need. M[i], for query i, is the sum of 1 - min(F[i, j], tau) / tau over the keys j that it sees,
with tau = 1; only F can lower it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx


@dataclass
class TrainingPass:
    """What selective layers do in training, and what they leave behind.

    Args:
        gain: () float32, multiplies S: None for the paper's.
        keep: () int32, keys that stay after each block of queries; None for all.
        block_size: queries of a block, where ``keep`` is given.

    Attributes:
        remaining: of each selective layer that ran, in order, M (B, T) float32.
    """

    gain: mx.array | None = None
    keep: mx.array | None = None
    block_size: int = 32
    remaining: list[mx.array] = field(default_factory=list)


_passes: list[TrainingPass] = []


@contextmanager
def training_pass(own: TrainingPass) -> Iterator[TrainingPass]:
    """Selective layers without a cache follow it while the block runs, in this process."""
    _passes.append(own)
    try:
        yield own
    finally:
        _passes.remove(own)


def current_pass() -> TrainingPass | None:
    """The innermost one, if there is one."""
    return _passes[-1] if _passes else None


def keys_needed(remaining: Sequence[mx.array], tokens: mx.array) -> mx.array:
    """The share of its keys that each layer still needs where it needs most, mean over the rows.

    Args:
        remaining: of each layer M (B, T), float32.
        tokens: (B,), how many tokens of each row are no padding, which stands behind them.

    Returns:
        (L,) float32 for L layers: max over queries i of M[i] / tokens; a row of padding counts 0.
    """
    real = mx.arange(remaining[0].shape[1]) < tokens[:, None]
    most = mx.stack([mx.where(real, one, 0).max(axis=1) for one in remaining])
    return (most / mx.maximum(tokens, 1)).mean(axis=1)


def memory_loss(remaining: Sequence[mx.array], tokens: mx.array) -> mx.array:
    """Sum over layers of max over queries of M, over layers times tokens; the mean of the rows.

    Args:
        remaining: of each layer M (B, T), float32.
        tokens: (B,), how many tokens of each row are no padding, which stands behind them.

    Returns:
        () float32, between 0 and 1; to be multiplied by the paper's eps = 0.1.
    """
    return keys_needed(remaining, tokens).mean()
