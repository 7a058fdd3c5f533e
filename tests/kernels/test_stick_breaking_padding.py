"""Left padding in stick-breaking: kernels run beside it, and give what plain MLX gives."""

import metal_host
import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering
from feeding import ROUNDING, Row, decode, difference, feed, left_padded_cache, merged, read_prompts
from methods import error, float64
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache
from place import BACKEND, FACTORS, FLOORS, host_only, launching
from stick_breaking_cases import definition, normal, shifted
from test_methods_through_kernels import CHUNKS, STICKS, plainly
from test_selective_kernel import names
from tiny import grafted, tokens

from mlx_selective import stick_breaking_attention
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels import outputs_start_as, record
from mlx_selective.kernels.stick_breaking_decode import stick_breaking_decode

#: rows without padding, with some, with padding up to the last key, and of padding alone
BEGINS = {20: [0, 7, 19, 40], 600: [0, 130, 599, 700], 1100: [3, 513, 1099, 1100]}


def by_kernel(q, k, v, **options):
    """The public function's results; what a kernel does not write stays NaN and shows."""
    with launching(), outputs_start_as(float("nan")), record() as ran:
        results = stick_breaking_attention(q, k, v, scale=q.shape[3] ** -0.5, **options)
        mx.eval(results)
    assert {one.backend for one in ran} == {BACKEND}
    return results


def check(q, k, v, begins, own, found):
    """Against NumPy float64, as plain MLX with a mask; queries of padding exactly."""
    scale, keys = q.shape[3] ** -0.5, k.shape[2]
    mask = (mx.arange(keys) >= begins[:, None])[:, None, None]
    plain = plain_stick_breaking(q, k, v, scale=scale, attend_current=own, mask=mask)
    truth = definition(*map(float64, (q, k, v)), scale, own, np.array(begins))
    assert error(found[0], truth[0]) <= 2 * error(plain[0], truth[0]) + FLOORS[q.dtype]
    worst = np.abs(float64(plain[1]) - truth[1]).max()
    assert np.abs(float64(found[1]) - truth[1]).max() <= 2 * worst + max(4e-7, FACTORS)
    padding = keys - q.shape[2] + mx.arange(q.shape[2]) < begins[:, None]
    for results in (found, plain):
        assert not mx.where(padding[:, None, :, None], results[0], 0).any()
        assert (mx.where(padding[:, None], results[1], 1) == 1).all()


SHAPES = {
    "dtype": list(FLOORS),
    "D": [64, 80, 96, 128],
    "queries": [1, 9],
    "keys": list(BEGINS),
    "heads": [(1, 1), (4, 2), (3, 3)],
    "own": [False, True],
    "integers": [mx.int32, mx.int64, mx.uint8],
}
CASES = covering(SHAPES, lambda keys, integers, **_: not (integers is mx.uint8 and keys > 20))


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_the_public_function(seed, case):
    keys, own, begins = case["keys"], case["own"], mx.array(BEGINS[case["keys"]])
    earlier = keys - case["queries"]
    q, k, v = normal(case["dtype"], case["D"], case["queries"], earlier, case["heads"], 4, seed)
    q, k = shifted(q, k, -6 * case["D"] ** 0.5)  # sticks that last until the padding
    found = by_kernel(q, k, v, attend_current=own, begins=begins.astype(case["integers"]))
    check(q, k, v, begins, own, found)


@pytest.mark.parametrize("rows", [1, 7, 8, 11])
def test_decoding_batches_of_any_size(rows):
    """Fewer than eight numbers would be in another address space; every second one is a copy."""
    arrays, begins = normal(T=1, earlier=30, heads=(2, 1), B=rows), mx.arange(2 * rows)[::2]
    check(*arrays, begins, False, by_kernel(*arrays, begins=begins))


@host_only
def test_decoding_does_not_read_padding():
    q, k, v = normal(mx.float16, T=1, earlier=511, heads=(1, 1), B=2)
    mx.eval(q, k, v)
    with metal_host.recording() as reports:
        by_kernel(-mx.abs(q), mx.abs(k), v, begins=mx.array([448, 512]))
    # 64 keys of the first row; of the second, none
    assert reports[0].device_read["k"] == reports[0].device_read["v"] == 64 * 64 * 2


@pytest.mark.parametrize("queries", [1, 9])
def test_gradients_are_those_of_the_definition(queries, monkeypatch):
    arrays = normal(T=queries, earlier=20, heads=(4, 2), B=3)

    def gradients():
        def loss(*arrays):
            out, left = stick_breaking_attention(*arrays, scale=0.3, begins=mx.array([0, 5, 18]))
            return (mx.sin(out) * out).sum() + (left * mx.arange(4)[:, None]).sum()

        return mx.grad(loss, (0, 1, 2))(*arrays)

    with launching(), record() as ran:
        ours = gradients()
        mx.eval(ours)
    assert {one.backend for one in ran} == {BACKEND}
    for one, other in zip(ours, plainly(monkeypatch, gradients), strict=True):
        assert error(one, float64(other)) < 1e-5
    assert not any(one[1, :, :5].any() for one in ours[1:])


@pytest.mark.parametrize("queries", [1, 12])
def test_masks_and_documents_beside_padding_are_for_plain_mlx(queries):
    """Each takes keys away on its own: what is left is what the oracle sees."""
    q, k, v = normal(T=12, heads=(4, 2), B=2)
    begins, hidden = mx.array([2, 6]), 7
    mask, documents = mx.arange(12) != hidden, mx.array([0] * 5 + [1] * 7)
    with launching(), record() as ran:
        masked, parted = (
            stick_breaking_attention(q[:, :, -queries:], k, v, scale=0.3, begins=begins, **options)
            for options in ({"mask": mask}, {"segment_ids": documents})
        )
        mx.eval(masked, parted)
    assert ran == []
    last = {}
    for row, begin in enumerate([2, 6]):
        seen = {
            "masked": [j for j in range(begin, 12) if j != hidden],
            "parted": range(max(begin, 5), 12),
        }
        for name, keys in seen.items():
            part = [float64(a[row : row + 1])[:, :, list(keys)] for a in (q, k, v)]
            last[name, row] = [one[:, :, -1] for one in oracle.stick_breaking(*part, 0.3)]
    for name, found in (("masked", masked), ("parted", parted)):
        for row in range(2):
            for one, other in zip(found, last[name, row], strict=True):
                assert error(one[row : row + 1, :, -1], other) < 3e-6


@pytest.mark.parametrize("begins", [mx.array([0]), mx.array([0.0, 0.0]), mx.array(0)], ids=str)
def test_begins_that_are_not_one_integer_a_row(begins):
    with pytest.raises(ValueError, match="begins must be integers, one for each of 2 rows; got"):
        stick_breaking_attention(*normal(B=2), scale=0.3, begins=begins)
    with launching(), record() as ran:
        options = {"scale": 0.3, "attend_current": True, "definition": None, "begins": begins}
        assert stick_breaking_decode(*normal(T=1, B=2), **options) is None
    assert ran[0].reason.startswith("begins of shape")


# In a model ---------------------------------------------------------------------------------------

FORMS = [{}, {"attend_current": True}, {"remainder": "value"}, {"remainder": "head_bias_norm"}]
forms = pytest.mark.parametrize("fields", FORMS, ids=str)


def sticks(fields, **config):
    return grafted("llama", {"kind": "stick_breaking", **fields}, hidden_size=256, **config)


@forms
def test_a_left_padded_batch_in_chunks_then_tokens(fields, monkeypatch):
    """The first chunk leaves a row with padding alone; of that row too nothing differs."""
    model, ids, pads = sticks(fields), tokens(3, sum(CHUNKS)), [0, 5, 14]
    with launching(), record() as ran:
        logits, _ = feed(model, ids, CHUNKS, left_padded_cache(model, pads))
        mx.eval(logits)
    assert {one.kernel for one in ran} == set(STICKS) and {one.backend for one in ran} == {BACKEND}
    expected = plainly(
        monkeypatch, lambda: feed(model, ids, CHUNKS, left_padded_cache(model, pads))[0]
    )
    assert difference(logits, expected) < ROUNDING
    for row, pad in enumerate(pads):
        alone = plainly(monkeypatch, lambda r=row, n=pad: model(ids[r : r + 1, n:]))
        assert difference(logits[row : row + 1, pad:], alone) < ROUNDING


@forms
def test_a_right_padded_batch_then_tokens(fields, monkeypatch):
    """As mlx-lm's batch generator reads prompts: padding is rolled to the left, then they go on."""
    model, rows, lengths = sticks(fields), [Row(ids) for ids in tokens(3, 20)], [15, 4, 9]
    cache = merged([make_prompt_cache(model) for _ in rows])
    assert all(type(layer) is BatchKVCache for layer in cache)
    with launching(), record() as ran:
        read_prompts(model, cache, rows, lengths, 6)
        decode(model, cache, rows, 2)
        for layer in cache:
            layer.filter([1, 2])  # which takes what both have in front
        rows = rows[1:]
        decode(model, cache, rows, 2)
        mx.eval([row.logits for row in rows])
    assert {one.kernel for one in ran} == set(STICKS) and {one.backend for one in ran} == {BACKEND}
    for row in rows:
        assert plainly(monkeypatch, lambda row=row: row.difference(model)) < ROUNDING, row.chunks


def test_mlx_lms_batch_cache_hides_left_padding_and_nothing_else():
    """The layer asks it for no mask: here is what its mask would have said, whatever befell it."""
    cache, other = BatchKVCache([0, 3, 8]), BatchKVCache([2])

    def feed_and_compare(count):
        mask, before = cache.make_mask(count), cache.size()
        own = before + mx.arange(count)[:, None]
        real = mx.arange(before + count) >= cache.left_padding[:, None, None, None]
        visible = (mx.arange(before + count) <= own) & real
        assert mx.array_equal(mx.broadcast_to(mask, visible.shape), visible)
        rows = len(cache.left_padding)
        cache.update_and_fetch(*[mx.ones((rows, 1, count, 4))] * 2)

    for count in (5, 1, 4):
        feed_and_compare(count)
    cache.prepare(lengths=[6, 1, 3], right_padding=[0, 5, 3])
    for count in (4, 2):
        feed_and_compare(count)
    cache.finalize()
    feed_and_compare(1)
    cache.filter([1, 2])
    feed_and_compare(1)
    other.update_and_fetch(*[mx.ones((1, 1, 7, 4))] * 2)
    cache.extend(other)
    feed_and_compare(3)
    cache.trim(2)
    feed_and_compare(1)


class Hiding(BatchKVCache):
    """A batch cache that hides one key more."""

    def make_mask(self, N, **options):
        mask = super().make_mask(N, **options)
        return mask & (mx.arange(mask.shape[-1]) != 6)


def test_a_mask_that_hides_more_is_for_plain_mlx(monkeypatch):
    model, ids = sticks({}), tokens(2, 14)

    def run(cache):
        return feed(model, ids, [12, 1, 1], [cache([0, 3]) for _ in model.layers])[0]

    with launching(), record() as ran:
        logits = run(Hiding)
        mx.eval(logits)
    assert ran == []
    assert mx.array_equal(logits, plainly(monkeypatch, lambda: run(Hiding)))
    assert difference(logits, plainly(monkeypatch, lambda: run(BatchKVCache))) > 100 * ROUNDING
