"""The pruned KV cache of selective attention: the keys that F has not condemned."""

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.cache import _BaseCache

#: The first token and the newest one never leave.
MIN_BUDGET = 2


class PrunedKVCache(_BaseCache):
    """Keys, values, positions and F of the tokens that one layer keeps.

    A call of the layer appends its tokens (:meth:`update_and_fetch`), attends, and hands back
    the new F (:meth:`prune`); only then the keys with the largest F leave for good, down to the
    budget, ties going to the oldest; the first token and the newest stay. ``offset`` is the true
    position of the next token whatever was evicted.

    Slots of a row hold kept keys in any order; ``positions`` tells which, -1 marking an empty
    slot. Until the budget is reached, slots grow in steps as in mlx-lm's KVCache. From then on
    there are budget + 1 of them and the next token takes the place of the key evicted last, so
    decoding writes one slot and moves nothing.

    Args:
        budget: keys to keep, at least 2, or None to keep all (F is tracked all the same).

    Attributes:
        keys, values: (B, Hkv, slots, D) after RoPE, in the model's dtype, or None.
        positions: (B, slots) int32.
        F: (B, slots) float32.
        hole: (B, 1) int32, the empty slot of each row once the budget is reached, else None.
        offset: tokens seen, the position of the next one.
        kept: keys kept in each row (``size()``). Rows of a batch advance together here; which
            keys each row keeps is its own affair.
    """

    step = 256

    def __init__(self, budget: int | None = None):
        self.budget = budget
        self.keys = self.values = self.positions = self.F = self.hole = None
        self.offset = 0
        self.kept = 0
        self._live = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Adds new tokens (B, Hkv, T, D) and returns the keys and values of all live ones.

        Live are the kept tokens and the new ones, also when they are more than the budget. With
        T > 1 the new tokens are last and in order.
        """
        T = keys.shape[2]
        if self.hole is not None and T == 1:
            self._write_hole(keys, values)
        else:
            if self.hole is not None:
                self._take(self._slots_by_position(self.kept))
                self.hole = None
            self._append(keys, values)
        self.offset += T
        self._live = self.kept + T
        return self.keys[:, :, : self._live], self.values[:, :, : self._live]

    @property
    def live_positions(self) -> mx.array:
        """(B, live) int32: positions of the keys that update_and_fetch returned."""
        return self.positions[:, : self._live]

    @property
    def live_F(self) -> mx.array:
        """(B, live) float32: F of those keys, 0 for new ones."""
        return self.F[:, : self._live]

    def prune(self, F: mx.array) -> None:
        """Stores F (B, live) after the attention of this call, and evicts down to the budget."""
        live, self._live = self._live, 0
        evict = 0 if self.budget is None else max(0, live - self.budget)
        self.kept = live - evict
        if evict == 1:
            self._evict_one(F)
        elif evict:
            self._evict_many(F, evict)
        else:
            self.F[:, :live] = F

    def _append(self, keys, values):
        """Writes new tokens behind the kept ones, growing in steps."""
        B, T, n = keys.shape[0], keys.shape[2], self.kept
        slots = 0 if self.keys is None else self.keys.shape[2]
        if n + T > slots:
            self._grow(keys, values, (n + T + self.step - 1) // self.step * self.step)
        self.keys[:, :, n : n + T] = keys
        self.values[:, :, n : n + T] = values
        new = mx.arange(self.offset, self.offset + T, dtype=mx.int32)
        self.positions[:, n : n + T] = mx.broadcast_to(new, (B, T))
        self.F[:, n : n + T] = mx.zeros((B, T), mx.float32)

    def _grow(self, keys, values, slots):
        """Makes room for ``slots`` tokens, or for what the budget can ever need."""
        B, Hkv, T, D = keys.shape
        if self.budget is not None:
            slots = max(self.kept + T, min(slots, self.budget + 1))
        more = slots - self.kept
        grown = [
            mx.zeros((B, Hkv, more, D), keys.dtype),
            mx.zeros((B, Hkv, more, values.shape[3]), values.dtype),
            mx.full((B, more), -1, mx.int32),
            mx.zeros((B, more), mx.float32),
        ]
        if self.keys is not None:
            kept = [
                self.keys[:, :, : self.kept],
                self.values[:, :, : self.kept],
                self.positions[:, : self.kept],
                self.F[:, : self.kept],
            ]
            grown = [
                mx.concatenate([old, new], axis=old.ndim // 2)
                for old, new in zip(kept, grown, strict=True)
            ]
        self.keys, self.values, self.positions, self.F = grown

    def _write_hole(self, keys, values):
        """Puts one new token per row in the slot that the last eviction left."""
        at = self.hole[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, mx.broadcast_to(at, keys.shape), keys, axis=2)
        self.values = mx.put_along_axis(
            self.values, mx.broadcast_to(at, values.shape), values, axis=2
        )
        new = mx.full(self.hole.shape, self.offset, mx.int32)
        self.positions = mx.put_along_axis(self.positions, self.hole, new, axis=1)
        # Its F is 0 already: _evict_one cleared the slot.

    def _rank_F(self, F):
        """F (B, live) with the first token and the newest out of reach of eviction."""
        positions = self.positions[:, : F.shape[1]]
        protected = (positions == 0) | (positions == self.offset - 1)
        return mx.where(protected, -1.0, F)

    def _evict_one(self, F):
        """Empties the slot with the largest F, the oldest of equals."""
        rank = self._rank_F(F)
        largest = rank == rank.max(axis=1, keepdims=True)
        age = mx.where(largest, self.positions, self.offset)
        self.hole = mx.argmin(age, axis=1, keepdims=True).astype(mx.int32)
        empty = mx.full(self.hole.shape, -1, mx.int32)
        self.positions = mx.put_along_axis(self.positions, self.hole, empty, axis=1)
        self.F = mx.put_along_axis(F, self.hole, mx.zeros(self.hole.shape), axis=1)

    def _evict_many(self, F, evict):
        """Keeps the budget's worth of keys, in order of position, and one empty slot."""
        live = F.shape[1]
        self.F = F
        order = self._slots_by_position(live)
        rank = mx.take_along_axis(self._rank_F(F), order, axis=1)
        limit = mx.sort(rank, axis=1)[:, live - evict, None]
        above, equal = rank > limit, rank == limit
        # Of the keys at the limit, the oldest go.
        room = evict - above.sum(axis=1, keepdims=True)
        gone = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=1) <= room))
        index = mx.arange(live)
        first = mx.argsort(mx.where(gone, live + index, index), axis=1)[:, : self.budget + 1]
        self._take(mx.take_along_axis(order, first, axis=1))
        self.hole = mx.full((F.shape[0], 1), self.budget, mx.int32)
        self.positions[:, self.budget :] = -1
        self.F[:, self.budget :] = 0.0

    def _slots_by_position(self, count):
        """(B, count): slots in order of position, empty ones last."""
        order = mx.where(self.positions < 0, self.offset, self.positions)
        return mx.argsort(order, axis=1)[:, :count]

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
        """Number of keys kept in each row."""
        return self.kept

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated for keys, values, positions and F."""
        arrays = (self.keys, self.values, self.positions, self.F)
        return sum(array.nbytes for array in arrays if array is not None)

    @property
    def state(self):
        return (
            self.keys, self.values, self.positions, self.F, self.hole,
            self.offset, self.kept, self.budget,
        )  # fmt: skip

    @state.setter
    def state(self, state):
        (
            self.keys, self.values, self.positions, self.F, self.hole,
            self.offset, self.kept, self.budget,
        ) = state  # fmt: skip
        self._live = 0

    def is_trimmable(self) -> bool:
        """False: F cannot be taken back, and evicted keys are gone."""
        return False


# load_prompt_cache looks classes up by name among mlx-lm's own.
mlx_lm_cache.PrunedKVCache = PrunedKVCache
