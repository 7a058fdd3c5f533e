"""The pruned KV cache of selective attention: the keys that F has not condemned."""

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache

from .batch import BatchRows

#: The first token and the newest one never leave.
MIN_BUDGET = 2


class PrunedKVCache(BatchRows):
    """Keys, values, positions and F of the tokens that one layer keeps.

    A call of the layer appends its tokens (:meth:`update_and_fetch`), attends, and hands back
    the new F (:meth:`prune`); only then the keys with the largest F leave for good, down to the
    budget, ties going to the oldest; the first token and the newest stay. ``offset`` is the true
    position of the next token whatever was evicted.

    A row's slots hold its kept keys in any order; ``positions`` tells which, -1 marking an empty
    slot. Until the budget is reached, slots grow in steps as in mlx-lm's KVCache. From then on
    there are budget + 1 of them and the next token takes the place of the key evicted last, so
    decoding writes one slot and moves nothing. Rows are independent: each has its own offset,
    kept keys and empty slot, and padding among the new tokens is never kept (see
    :class:`~mlx_selective.cache.batch.BatchRows`).

    Args:
        budget: keys to keep, at least 2, or None to keep all (F is tracked all the same).

    Attributes:
        keys, values: (B, Hkv, slots, D) after RoPE, in the model's dtype, or None.
        positions: (B, slots) int32.
        F: (B, slots) float32.
        hole: (B, 1) int32, an empty slot of each row once the budget is reached, else None.
        query_positions: (B, T) int32, positions of the tokens that came last, negative for padding.
        offsets: tokens seen by each row, its next position (negative: left padding to come).
        kept: keys kept in each row.
    """

    step = 256

    def __init__(self, budget: int | None = None):
        self.budget = budget
        self.keys = self.values = self.positions = self.F = self.hole = None
        self.query_positions: mx.array | None = None
        self.offsets: list[int] = []
        self.kept: list[int] = []
        self._live = 0

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or (B,) int32 where rows differ."""
        if len(set(self.offsets)) > 1:
            return mx.array(self.offsets, mx.int32)
        return self.offsets[0] if self.offsets else 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Adds new tokens (B, Hkv, T, D) and returns the keys and values of all live slots.

        Live are the kept tokens and the new ones, also when they are more than the budget. With
        T > 1 the new tokens are last and in order.

        Raises:
            RuntimeError: if the call before was not ended by :meth:`prune`.
            ValueError: if the rows are not as many as before.
        """
        if self._live:
            raise RuntimeError("prune(F) must follow each update_and_fetch.")
        B, _, T, _ = keys.shape
        if self.offsets and len(self.offsets) != B:
            raise ValueError(f"this cache holds {len(self.offsets)} rows, the call has {B}.")
        if not self.offsets:
            self.offsets, self.kept = [0] * B, [0] * B
        new, tokens = self._positions_of_next(T)
        if self.hole is not None and T == 1:
            self._live = self.keys.shape[2]
            self._write_hole(keys, values, new)
        else:
            if self.hole is not None:
                self._close_ranks()
            self._append(keys, values, new)
        self.query_positions = new
        self.kept = [kept + more for kept, more in zip(self.kept, tokens, strict=True)]
        return self.keys[:, :, : self._live], self.values[:, :, : self._live]

    @property
    def live_positions(self) -> mx.array:
        """(B, live) int32: positions of the keys that update_and_fetch returned, -1 if empty."""
        return self.positions[:, : self._live]

    @property
    def live_F(self) -> mx.array:
        """(B, live) float32: F of those keys, 0 for new ones."""
        return self.F[:, : self._live]

    def to_evict(self) -> list[int]:
        """How many keys of each row leave when this call ends."""
        budget = max(self.kept) if self.budget is None else self.budget
        return [max(0, kept - budget) for kept in self.kept]

    def prune(self, F: mx.array, slots: mx.array | None = None) -> None:
        """Stores F (B, live) after the attention of this call, and evicts down to the budget.

        Args:
            F: (B, live) float32, after this call's queries.
            slots: (B, 1) int32, where one key leaves in each row (or an empty slot is, in rows
                in which none does): what a kernel chose by the same rule.
        """
        live, self._live = self._live, 0
        evict = self.to_evict()
        self.kept = [kept - gone for kept, gone in zip(self.kept, evict, strict=True)]
        if not any(evict):
            self.F[:, :live] = F
            # Padding left gaps, or a row below the budget again (which was raised) has a hole.
            if live > max(self.kept) or self.hole is not None:
                self._close_ranks()
        elif max(evict) == 1 and live == self.budget + 1:
            self.F = F
            self._empty(self._slot_to_evict(_column(evict)) if slots is None else slots)
        else:
            self.F, self.positions = F, self.positions[:, :live]
            self._evict_many(_column(evict))

    def _append(self, keys, values, positions):
        """Writes new tokens behind the slots in use, growing in steps."""
        B, _, T, _ = keys.shape
        start, end = max(self.kept), max(self.kept) + T
        if self.keys is None or end > self.keys.shape[2]:
            self._grow(keys, values, start, (end + self.step - 1) // self.step * self.step)
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values
        self.positions[:, start:end] = positions
        self.F[:, start:end] = mx.zeros((B, T), mx.float32)
        self._live = end

    def _close_ranks(self):
        """Brings every row's tokens to its first slots, so that new ones can follow them."""
        self._take(self._slots_by_position()[:, : max(self.kept)])
        self.hole = None

    def _grow(self, keys, values, used, slots):
        """Makes room for ``slots`` tokens, or for what the budget can ever need."""
        B, Hkv, T, D = keys.shape
        if self.budget is not None:
            slots = max(used + T, min(slots, self.budget + 1))
        more = slots - used
        grown = [
            mx.zeros((B, Hkv, more, D), keys.dtype),
            mx.zeros((B, Hkv, more, values.shape[3]), values.dtype),
            mx.full((B, more), -1, mx.int32),
            mx.zeros((B, more), mx.float32),
        ]
        if self.keys is not None:
            held = (self.keys[:, :, :used], self.values[:, :, :used])
            held += (self.positions[:, :used], self.F[:, :used])
            grown = [
                mx.concatenate([old, new], axis=old.ndim // 2)
                for old, new in zip(held, grown, strict=True)
            ]
        self.keys, self.values, self.positions, self.F = grown

    def _write_hole(self, keys, values, positions):
        """Puts one new token per row in the slot that the last eviction left."""
        at = self.hole[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(
            self.values, mx.broadcast_to(at, values.shape), values, axis=2
        )
        # Its F is 0 already: whoever emptied the slot cleared it.
        self.positions = mx.put_along_axis(self.positions, self.hole, positions, axis=1)

    def _rank(self):
        """F with the first token, the newest and empty slots out of reach of eviction."""
        newest = _column(self.offsets) - 1
        protected = (self.positions <= 0) | (self.positions == newest)
        return mx.where(protected, -1.0, self.F)

    def _slot_to_evict(self, evict):
        """(B, 1): the slot with the largest F, the oldest of equals, in rows that evict."""
        rank = self._rank()
        largest = rank == rank.max(axis=1, keepdims=True)
        # A row that does not evict has an empty slot, whose position is the smallest.
        age = mx.where((evict == 0) | largest, self.positions, _column(self.offsets))
        return mx.argmin(age, axis=1, keepdims=True).astype(mx.int32)

    def _empty(self, slots):
        """Makes a hole of one slot in each row."""
        self.hole = slots
        empty = mx.full(self.hole.shape, -1, mx.int32)
        self.positions = mx.put_along_axis(self.positions, self.hole, empty, axis=1)
        self.F = mx.put_along_axis(self.F, self.hole, mx.zeros(self.hole.shape), axis=1)

    def _evict_many(self, evict):
        """Keeps each row's share, in order of position, and one empty slot behind it."""
        live, width = self.F.shape[1], max(self.kept) + 1
        order = self._slots_by_position()
        rank = mx.take_along_axis(self._rank(), order, axis=1)
        gone = which_leave(rank, evict)
        index = mx.arange(live)
        first = mx.argsort(mx.where(gone, live + index, index), axis=1)[:, :width]
        self._take(mx.take_along_axis(order, first, axis=1))
        held = mx.arange(width) < _column(self.kept)
        self.positions = mx.where(held, self.positions, -1)
        self.F = mx.where(held, self.F, 0.0)
        self.hole = mx.full((len(self.kept), 1), width - 1, mx.int32)

    def _slots_by_position(self):
        """(B, slots): slots in order of position, empty ones last."""
        return mx.argsort(
            mx.where(self.positions < 0, _column(self.offsets), self.positions), axis=1
        )

    def _take(self, slots):
        """Keeps only the given slots (B, count), and frees the others."""
        at = slots[:, None, :, None]
        self.keys = mx.take_along_axis(self.keys, at, axis=2)
        self.values = mx.take_along_axis(self.values, at, axis=2)
        self.positions = mx.take_along_axis(self.positions, slots, axis=1)
        self.F = mx.take_along_axis(self.F, slots, axis=1)

    def make_mask(self, N, return_array=False, window_size=None):
        """None: positions decide what a query sees, see :func:`selective_attention`."""
        return None

    def size(self) -> int:
        """Number of keys kept, in the row that keeps most."""
        return max(self.kept, default=0)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for keys, values, positions and F."""
        arrays = (self.keys, self.values, self.positions, self.F)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def state(self):
        """Everything, as arrays: what mlx-lm evaluates, saves and copies (empty for None)."""
        arrays = (self.keys, self.values, self.positions, self.F, self.hole)
        counts = [self.offsets, self.kept, [] if self.budget is None else [self.budget]]
        return (
            *(mx.zeros((0,)) if array is None else array for array in arrays),
            *(mx.array(numbers, mx.int32) for numbers in counts),
        )

    @state.setter
    def state(self, state):
        *arrays, offsets, kept, budget = state
        self.keys, self.values, self.positions, self.F, self.hole = (
            array if array.size else None for array in arrays
        )
        self.offsets, self.kept = offsets.tolist(), kept.tolist()
        self.budget = budget.item() if budget.size else None
        self._live = 0

    def is_trimmable(self) -> bool:
        """False: F cannot be taken back, and evicted keys are gone."""
        return False


def which_leave(rank: mx.array, count: mx.array) -> mx.array:
    """The keys with the largest ranks, of equals the oldest.

    Args:
        rank: (B, N) float32, in order of position.
        count: (B, 1) int32, how many leave in each row.

    Returns:
        (B, N) bool.
    """
    N = rank.shape[1]
    last = mx.take_along_axis(mx.sort(rank, axis=1), mx.minimum(N - count, N - 1), axis=1)
    last = mx.where(count == 0, mx.inf, last)
    above, equal = rank > last, rank == last
    # Of the keys that share the last rank to go, the oldest go.
    room = count - above.sum(axis=1, keepdims=True)
    return above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=1) <= room))


def _column(rows: list[int]) -> mx.array:
    """One number a row, as (B, 1) int32."""
    return mx.array(rows, mx.int32)[:, None]


# load_prompt_cache looks classes up by name among mlx-lm's own.
mlx_lm_cache.PrunedKVCache = PrunedKVCache
