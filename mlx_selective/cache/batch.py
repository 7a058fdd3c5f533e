"""Rows of a batch: what mlx-lm's batch generator and server ask of a cache."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import _BaseCache


class BatchRows(_BaseCache):
    """The part of :class:`PrunedKVCache` that joins, parts and pads rows.

    mlx-lm merges the caches of single requests into a batch (:meth:`merge`), reads their prompts
    padded on the right (:meth:`prepare`, :meth:`finalize`), takes finished rows out
    (:meth:`filter`, :meth:`extract`) and new ones in (:meth:`extend`). Padding is never a token:
    it has a negative position, counts for no budget, and nothing has to be moved afterwards.
    """

    #: tokens of each row that are still to come before its right padding; None without any
    _awaited: list[int] | None = None

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announces padding in the tokens that come next.

        Args:
            left_padding: padding before each row's first token.
            lengths: tokens of each row up to :meth:`finalize`; what follows them is padding.
            right_padding: padding behind them, as mlx-lm counts it; needs lengths.

        Raises:
            ValueError: if left padding comes after tokens, or right padding without lengths.
        """
        if left_padding is not None:
            if any(self.kept):
                raise ValueError("left padding can only stand before a row's first token.")
            before = self.offsets or [0] * len(left_padding)
            self.kept = [0] * len(before)
            self.offsets = [
                offset - padding for offset, padding in zip(before, left_padding, strict=True)
            ]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding needs the lengths of the rows before it.")
            self._awaited = list(lengths)

    def finalize(self) -> None:
        """Ends the right padding; the next tokens follow each row's last one."""
        self._awaited = None

    def _positions_of_next(self, count: int) -> tuple[mx.array, list[int]]:
        """Positions (B, count) of the next tokens, negative for padding; tokens in each row."""
        positions = mx.array(self.offsets, mx.int32)[:, None] + mx.arange(count)
        padding = [min(max(-offset, 0), count) for offset in self.offsets]
        steps = [count] * len(self.offsets)
        if self._awaited is not None:
            steps = [min(count, awaited) for awaited in self._awaited]
            self._awaited = [a - step for a, step in zip(self._awaited, steps, strict=True)]
            positions = mx.where(mx.arange(count) < mx.array(steps)[:, None], positions, -1)
        self.offsets = [offset + step for offset, step in zip(self.offsets, steps, strict=True)]
        return positions, [
            max(step - before, 0) for step, before in zip(steps, padding, strict=True)
        ]

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        """One cache with the rows of all, in order; the given ones are left as they are."""
        merged = cls(caches[0].budget)
        merged._join(caches)
        return merged

    def extend(self, other: Any) -> None:
        """Takes in the rows of another cache, behind its own."""
        self._join([self, other])

    def _join(self, caches):
        budgets = [cache.budget for cache in caches]
        if any(budget != budgets[0] for budget in budgets):
            raise ValueError(f"caches with different budgets cannot be one batch: {budgets}.")
        if any(cache._live or cache._awaited for cache in caches):
            raise RuntimeError("caches cannot be joined in the middle of a call or of padding.")
        slots = max(cache.size() for cache in caches)
        filled = [cache.keys for cache in caches if cache.keys is not None]
        if filled:
            values = next(cache.values for cache in caches if cache.values is not None)
            parts = [cache._front(slots, filled[0], values) for cache in caches]
            joined = [mx.concatenate(part, axis=0) for part in zip(*parts, strict=True)]
            self.keys, self.values, self.positions, self.F = joined
        offsets = [offset for cache in caches for offset in cache.offsets or [0]]
        self.kept = [kept for cache in caches for kept in cache.kept or [0]]
        self.offsets, self.hole = offsets, None

    def _front(self, slots, like_keys, like_values):
        """Keys, values, positions and F with each row's tokens first, in ``slots`` slots."""
        if self.keys is None:
            rows, heads = max(len(self.offsets), 1), like_keys.shape[1]
            return [
                mx.zeros((rows, heads, slots, like_keys.shape[3]), like_keys.dtype),
                mx.zeros((rows, heads, slots, like_values.shape[3]), like_values.dtype),
                mx.full((rows, slots), -1, mx.int32),
                mx.zeros((rows, slots), mx.float32),
            ]
        order = self._slots_by_position()[:, : self.size()]
        at, more = order[:, None, :, None], slots - self.size()
        positions = mx.take_along_axis(self.positions, order, axis=1)
        four = ((0, 0), (0, 0), (0, more), (0, 0))
        return [
            mx.pad(mx.take_along_axis(self.keys, at, axis=2), four),
            mx.pad(mx.take_along_axis(self.values, at, axis=2), four),
            mx.pad(positions, ((0, 0), (0, more)), constant_values=-1),
            mx.pad(mx.take_along_axis(self.F, order, axis=1), ((0, 0), (0, more))),
        ]

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keeps only the given rows, in the given order."""
        if isinstance(batch_indices, mx.array):
            batch_indices = batch_indices.tolist()
        rows = list(batch_indices)
        self.offsets = [self.offsets[row] for row in rows]
        self.kept = [self.kept[row] for row in rows]
        if self._awaited is not None:
            self._awaited = [self._awaited[row] for row in rows]
        if self.keys is None:
            return
        index = mx.array(rows, mx.int32)
        self.keys, self.values = self.keys[index], self.values[index]
        self.positions, self.F = self.positions[index], self.F[index]
        self._close_ranks()

    def extract(self, idx: int) -> Any:
        """The cache of one row alone."""
        cache = type(self)(self.budget)
        cache.offsets, cache.kept = list(self.offsets), list(self.kept)
        cache.keys, cache.values = self.keys, self.values
        cache.positions, cache.F = self.positions, self.F
        cache.filter([idx])
        return cache
