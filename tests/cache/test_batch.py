"""Rows of a batch in the pruned cache: each row is what it would be alone."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer import attend, kept_in_row, run
from methods import error, float64, random_qkv
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_selective import PrunedKVCache, account

few_examples = settings(max_examples=25, deadline=None)
H, HKV, D = 4, 2, 8


class Row:
    """One sequence with a cache of its own: what a row of a batch is compared with."""

    def __init__(self, seed, budget):
        (self.q, self.k, self.v), _ = random_qkv(seed, B=1, H=H, Hkv=HKV, T=120, D=D)
        self.cache = PrunedKVCache(budget)
        self.fed = 0

    def feed(self, count):
        """Feeds the next tokens; their q, k, v (1, heads, count, D), and the output."""
        parts = [a[:, :, self.fed : self.fed + count] for a in (self.q, self.k, self.v)]
        self.fed += count
        return parts, attend(self.cache, *parts) if count else None


def feed_together(batch, rows, counts):
    """Feeds every row its next tokens side by side, padded on the right with rubbish."""
    width = max(counts)
    padded, expected = [], []
    for row, count in zip(rows, counts, strict=True):
        parts, output = row.feed(count)
        room = [(0, 0), (0, 0), (0, width - count), (0, 0)]
        padded.append([mx.pad(part, room, constant_values=9.0) for part in parts])
        expected.append(output)
    output = attend(batch, *(mx.concatenate(part) for part in zip(*padded, strict=True)))
    for index, (alone, count) in enumerate(zip(expected, counts, strict=True)):
        if count:
            assert error(output[index : index + 1, :, :count], float64(alone)) < 1e-5
        assert (output[index, :, count:] == 0).all(), "padding attends to nothing"


def check_rows(batch, rows):
    """Every row holds exactly what its own cache holds."""
    assert batch.offsets == [row.fed for row in rows]
    assert batch.kept == [row.cache.size() for row in rows]
    for index, row in enumerate(rows):
        if row.fed == 0:
            continue
        positions, F, keys, values = kept_in_row(batch, index)
        alone = kept_in_row(row.cache, 0)
        assert positions.tolist() == alone[0].tolist()
        assert np.allclose(F, alone[1], rtol=1e-5, atol=1e-5)
        assert (keys == alone[2]).all() and (values == alone[3]).all()


def read_prompts(batch, rows, lengths, step):
    """Prompts of different lengths, padded on the right, in chunks of ``step``."""
    padding = [max(lengths) - length for length in lengths]
    if max(padding) > 0:
        batch.prepare(lengths=lengths, right_padding=padding)
    left = list(lengths)
    for start in range(0, max(lengths), step):
        width = min(step, max(lengths) - start)
        counts = [min(width, n) for n in left]
        feed_together(batch, rows, counts)
        left = [n - count for n, count in zip(left, counts, strict=True)]
    if max(padding) > 0:
        batch.finalize()


@settings(max_examples=40, deadline=None)
@given(budget=st.sampled_from([2, 3, 6, None]), data=st.data())
def test_rows_come_and_go_as_if_alone(budget, data):
    """Merging, prompts of different lengths, decoding, rows that end and rows that join."""
    rows = [Row(seed, budget) for seed in range(data.draw(st.integers(1, 3)))]
    for row in rows:
        row.feed(data.draw(st.sampled_from([0, 0, 1, 7, 13])))
    batch = PrunedKVCache.merge([row.cache for row in rows])
    check_rows(batch, rows)
    for number in range(data.draw(st.integers(1, 6))):
        action = data.draw(st.sampled_from(["prompt", "decode", "decode", "filter", "join"]))
        if action == "prompt":
            lengths = [data.draw(st.integers(0, 9)) for _ in rows]
            lengths[data.draw(st.integers(0, len(rows) - 1))] = 9
            read_prompts(batch, rows, lengths, data.draw(st.sampled_from([1, 4, 9])))
        elif action == "decode":
            for _ in range(3):
                feed_together(batch, rows, [1] * len(rows))
        elif action == "filter" and len(rows) > 1:
            keep = data.draw(st.permutations(range(len(rows))))[: len(rows) - 1]
            batch.filter(keep if number % 2 else mx.array(keep))
            rows = [rows[index] for index in keep]
        elif action == "join" and len(rows) < 4:
            new = Row(10 + number, budget)
            new.feed(data.draw(st.sampled_from([0, 1, 8])))
            batch.extend(PrunedKVCache.merge([new.cache]))
            rows = [*rows, new]
        check_rows(batch, rows)
    for index, row in enumerate(rows):
        check_rows(batch.extract(index), [row])


@few_examples
@given(pads=st.lists(st.integers(0, 9), min_size=1, max_size=3), step=st.sampled_from([1, 3, 20]))
def test_left_padding_is_no_token(pads, step):
    """The first real token is the protected one; pads hold no budget and add nothing to F."""
    rows = [Row(seed, 5) for seed in range(len(pads))]
    batch = PrunedKVCache(5)
    batch.prepare(left_padding=pads)
    total = max(pads) + 10
    for start in range(0, total, step):
        end = min(start + step, total)
        counts = [max(0, end - max(pad, start)) for pad in pads]
        parts = []
        for row, count in zip(rows, counts, strict=True):
            own, _ = row.feed(count)
            room = [(0, 0), (0, 0), (end - start - count, 0), (0, 0)]
            parts.append([mx.pad(part, room, constant_values=9.0) for part in own])
        attend(batch, *(mx.concatenate(part) for part in zip(*parts, strict=True)))
    check_rows(batch, rows)
    for _ in range(8):
        feed_together(batch, rows, [1] * len(rows))
    check_rows(batch, rows)


def test_merging_leaves_the_single_caches_as_they_were():
    rows = [Row(seed, 6) for seed in range(2)]
    for row, count in zip(rows, (20, 3), strict=True):
        row.feed(count)
    before = [copy.deepcopy(row.cache) for row in rows]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    other = batch.extract(1)
    run(batch, *(mx.concatenate([a, a]) for a in (rows[0].q, rows[0].k, rows[0].v)), [4], fed=30)
    for row, cache in zip(rows, before, strict=True):
        for mine, theirs in zip(row.cache.state, cache.state, strict=True):
            assert mx.array_equal(mine, theirs)
    check_rows(other, rows[1:])


@few_examples
@given(lengths=st.lists(st.integers(2, 20), min_size=2, max_size=3), later=st.sampled_from([3, 30]))
def test_rows_of_their_own_under_another_budget(lengths, later):
    """Whatever was kept before, every row afterwards holds what it would hold alone."""
    rows = [Row(seed, 6) for seed in range(len(lengths))]
    for row, length in zip(rows, lengths, strict=True):
        row.feed(length)
    batch = PrunedKVCache.merge([row.cache for row in rows])
    for counts in (1, 1, 2):
        feed_together(batch, rows, [counts] * len(rows))
    for cache in (batch, *(row.cache for row in rows)):
        cache.budget = later
    for counts in (1, 1, 1, 1, 3, 1):
        feed_together(batch, rows, [counts] * len(rows))
        check_rows(batch, rows)


def test_memory_follows_the_rows():
    """A row that leaves frees its part; padding frees its slots at the end of the call."""
    rows = [Row(seed, 16) for seed in range(3)]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    read_prompts(batch, rows, [40, 3, 17], 40)
    full = batch.nbytes
    assert full == 3 * 17 * (2 * HKV * D * 4 + 8)
    batch.filter([1])
    assert batch.nbytes == 3 * (2 * HKV * D * 4 + 8)
    rows = [Row(0, None), Row(1, None)]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    rows[1].feed(28)
    batch.extend(rows[1].cache)
    batch.filter([0, 2])
    read_prompts(batch, rows, [9, 2], 9)
    assert batch.keys.shape[2] == 30, "28 tokens and 9 slots of which 7 were padding"


def test_account_of_a_batch():
    rows = [Row(seed, 8) for seed in range(2)]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    read_prompts(batch, rows, [30, 5], 30)
    held = account([batch])
    assert (held.kept, held.tokens, held.bytes) == (8, 30, batch.nbytes)
    assert held.full_bytes == 2 * 256 * 2 * HKV * D * 4


def test_a_batch_is_saved_and_copied(tmp_path):
    rows = [Row(seed, 6) for seed in range(2)]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    read_prompts(batch, rows, [12, 4], 5)
    save_prompt_cache(str(tmp_path / "batch.safetensors"), [batch])
    (loaded,) = load_prompt_cache(str(tmp_path / "batch.safetensors"))
    for cache in (loaded, copy.deepcopy(batch)):
        check_rows(cache, rows)
        feed_together(cache, copy.deepcopy(rows), [1, 1])


@pytest.mark.parametrize(
    "act, error_type, words",
    [
        (lambda c: c.prepare(right_padding=[1, 0]), ValueError, "needs the lengths"),
        (lambda c: c.prepare(left_padding=[1, 0]), ValueError, "before a row's first token"),
        (lambda c: c.extend(PrunedKVCache(7)), ValueError, r"different budgets .*\[6, 7\]"),
        (
            lambda c: (c.prepare(lengths=[1, 2], right_padding=[1, 0]), c.extend(c)),
            RuntimeError,
            "middle",
        ),
    ],
)
def test_what_a_batch_cannot_do_is_told(act, error_type, words):
    rows = [Row(seed, 6) for seed in range(2)]
    batch = PrunedKVCache.merge([row.cache for row in rows])
    feed_together(batch, rows, [3, 3])
    with pytest.raises(error_type, match=words):
        act(batch)
