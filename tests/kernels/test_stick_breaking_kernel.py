"""The stick-breaking kernel as Metal text on the processor, against the definition in float64."""

import shutil

import metal_host
import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering, every
from methods import error, float64
from place import FACTORS, FLOORS, host_only
from stick_breaking_cases import by_kernel, definition, normal, plain, rms, shifted

from mlx_selective.kernels import stick_breaking as module
from mlx_selective.kernels.causal_attention import Blocks
from mlx_selective.kernels.kernel import Kernel
from mlx_selective.kernels.source import KERNEL_FOLDER

BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
SHAPES = {
    "dtype": list(FLOORS),
    "D": [64, 80, 96, 128],
    "T": [1, 7, 31, 33, 127],
    "earlier": [0, 1, 30, 77],  # keys before the first query
    "heads": [(1, 1), (4, 1), (6, 2)],  # H, Hkv
    "B": [1, 2],
    "attend_current": [False, True],
    "padding": [None, 3, 40],  # keys that stand before the first row's text
    "by": [0, -3],  # added to the logits: about ten keys take all, or many share
}


def check(*problems, attend_current=False, begins=None, **options):
    """Over all (q, k, v, scale), at most twice the error of plain MLX in that dtype, and a floor.

    A remainder may be off by 2^-29 beside, where the kernel stops. Returns the share of that.
    """
    truths, ours, theirs = ([], []), ([], []), ([], [])
    case = {"attend_current": attend_current, "begins": begins}
    for q, k, v, scale in problems:
        got = by_kernel(q, k, v, scale, **case, **options)
        assert [part.dtype for part in got] == [q.dtype, mx.float32]
        truth = definition(
            *map(float64, (q, k, v)),
            scale,
            attend_current,
            None if begins is None else begins.tolist(),
        )
        for kept, parts in ((truths, truth), (ours, got), (theirs, plain(q, k, v, scale, **case))):
            for part, one in zip(kept, parts, strict=True):
                part.append(one if isinstance(one, np.ndarray) else float64(one))
    shares = []
    floors, beside = (FLOORS[q.dtype], FACTORS), (0, 2**-29)
    for floor, stopped, *parts in zip(floors, beside, truths, ours, theirs, strict=True):
        truth, got, expected = map(np.concatenate, parts)
        size, found, by_plain = rms(truth), rms(got - truth), rms(expected - truth)
        most = 2 * by_plain + floor * size + stopped
        assert found <= most
        shares.append(found / most if most else 0)  # the first token of a text alone is zero
    return max(shares)


def check_shape(seed, D, B, heads, T, earlier, by, padding, attend_current, **case):
    """Few weights are drawn several times: the error of a few is a matter of luck."""
    case |= {"D": D, "B": B, "heads": heads, "T": T, "earlier": earlier}
    begins = None if padding is None else mx.array([min(padding, T + earlier), 0][:B])
    keys = [T + earlier - begin for begin in ([0] * B if begins is None else begins.tolist())]
    weights = heads[0] * sum(min(T, seen) * min(8, seen) for seen in keys)
    problems = []
    for i in range(-(-768 // weights) if weights else 1):
        q, k, v = normal(**case, seed=100 * seed + i)
        problems.append((*shifted(q, k, by * D**0.5), v, D**-0.5))
    return check(*problems, attend_current=attend_current, begins=begins)


def names(case):
    return "-".join(str(value).replace("mlx.core.", "") for value in case.values())


CASES = covering(SHAPES)


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_shapes(seed, case):
    check_shape(seed, **case)


@pytest.mark.slow
@pytest.mark.parametrize("D", SHAPES["D"])
@pytest.mark.parametrize("dtype", SHAPES["dtype"], ids=str)
def test_every_shape(dtype, D):
    cases = every(SHAPES | {"dtype": [dtype], "D": [D]})
    print(max(check_shape(seed, **case) for seed, case in enumerate(cases)))


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("by", [0, -4, -8])
def test_a_thousand_tokens(dtype, by):
    q, k, v = normal(dtype, T=1000)
    check((*shifted(q, k, 8 * by), v, 0.125))


@host_only
@pytest.mark.parametrize(
    "dtype, blocks",
    [
        (mx.float16, Blocks(32, 16, 8, 2)),  # two pairs of blocks of keys and values
        (mx.bfloat16, Blocks(32, 32, 8, 2, True)),  # and the queries in threadgroup memory
        (mx.float32, Blocks(64, 16, 16, 1, True)),  # two fragments of rows
        (mx.float32, Blocks(16, 48, 8, 1)),
        (mx.float16, Blocks(32, 64, 16, 1)),  # two chunks of 32 keys
    ],
    ids=str,
)
@pytest.mark.parametrize("product_form", [True, False])
def test_other_blocks_in_both_forms(dtype, blocks, product_form):
    for T, earlier, by in ((33, 0, 0), (70, 31, -30)):
        q, k, v = normal(dtype, 64, T, earlier)
        check((*shifted(q, k, by), v, 0.125), blocks=blocks, product_form=product_form)


@pytest.mark.parametrize("product_form", [True, False])
@pytest.mark.parametrize("attend_current", [False, True])
def test_the_oracle_says_the_same(attend_current, product_form):
    arrays = normal(T=37, heads=(4, 2), B=2)
    got = by_kernel(*arrays, 0.1, attend_current=attend_current, product_form=product_form)
    truth = oracle.stick_breaking(*map(float64, arrays), 0.1, attend_current)
    for one, other in zip(got, truth, strict=True):
        assert error(one, other) < 3e-7


# Properties ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("product_form", [True, False])
@pytest.mark.parametrize("by", [100, 3, 0, -3, -100])
def test_weights_and_remainder_are_a_whole(by, product_form):
    """Values of one number: the output is the sum of the weights."""
    q, k, _ = normal(T=100, earlier=50)
    ones = mx.ones(k.shape)
    out, remainder = by_kernel(*shifted(q, k, 8 * by), ones, 0.125, product_form=product_form)
    assert mx.abs(out[..., 0] + remainder - 1).max().item() < 2e-6
    assert remainder.min().item() >= 0


def test_chunks_are_the_whole():
    q, k, v = normal(T=90, heads=(4, 2))
    whole = by_kernel(q, k, v, 0.125)
    for start, end in ((0, 1), (1, 50), (50, 90)):
        part = by_kernel(q[:, :, start:end], k[:, :, :end], v[:, :, :end], 0.125)
        for one, other in zip(part, whole, strict=True):
            assert mx.abs(one - other[:, :, start:end]).max().item() < 3e-6


@pytest.mark.parametrize("attend_current", [False, True])
def test_left_padding_changes_nothing(attend_current):
    q, k, v = normal(T=60, heads=(4, 2))
    bare = by_kernel(q, k, v, 0.125, attend_current=attend_current)
    junk = [mx.concatenate([mx.full((*a.shape[:2], 45, 64), 9.0), a], 2) for a in (q, k, v)]
    begins = mx.array([45])
    padded = by_kernel(*junk, 0.125, attend_current=attend_current, begins=begins)
    for one, other in zip(padded, bare, strict=True):
        assert mx.abs(one[:, :, 45:] - other).max().item() < 3e-6
    assert not padded[0][:, :, :45].any() and (padded[1][:, :, :45] == 1).all()


@host_only
def test_blocks_of_padding_are_not_read():
    q, k, v = shifted_normal(-100, T=32, earlier=224)
    read = []
    for begin in (0, 224):
        with metal_host.recording() as reports:
            by_kernel(q, k, v, 0.125, begins=mx.array([begin]))
        read.append(reports[0].device_read["k"])
    assert read[1] == read[0] / 8


def shifted_normal(by, **case):
    """The logits have ``by`` added, at a scale of 1/8."""
    q, k, v = normal(**case)
    return *shifted(q, k, 8 * by), v


# Logits that use up the stick, and such that never do ---------------------------------------------


@host_only
@pytest.mark.parametrize("product_form", [True, False])
@pytest.mark.parametrize("blocks", [Blocks(32, 16, 8, 1), Blocks(32, 16, 8, 2)], ids=str)
@pytest.mark.parametrize("by", [25, 1e4])
def test_sticks_that_are_used_up_end_the_reading(by, blocks, product_form):
    """One head, its last 32 queries: they see two blocks of their own, and one that is older."""
    q, k, v = shifted_normal(by, T=32, earlier=480, heads=(1, 1))
    with metal_host.recording() as reports:
        out, remainder = by_kernel(q, k, v, 0.125, blocks=blocks, product_form=product_form)
    # ... the oldest query needs the key before its own, and a copy may be under way already
    most = 16 * (3 + (blocks.pairs == 2)) * 64 * 4
    assert 0 < reports[0].device_read["k"] <= most and 0 < reports[0].device_read["v"] <= most
    truth, rest = definition(*map(float64, (q, k, v)), 0.125)
    assert np.abs(float64(out) - truth).max() <= 1e-6
    assert np.abs(float64(remainder) - rest).max() <= 2**-29


@host_only
def test_a_single_stick_that_lasts_keeps_its_threadgroup_reading():
    q, k, v = shifted_normal(1e4, T=32, earlier=480, heads=(1, 1))
    q[:, :, 17] = 0 * q[:, :, 17]
    q[:, :, 17, 0] = -1
    with metal_host.recording() as reports:
        out, remainder = by_kernel(q, k, v, 0.125)
    assert reports[0].device_read["k"] == 512 * 64 * 4
    assert remainder[0, 0, 17].item() == 1 and not out[0, 0, 17].any()


@pytest.mark.parametrize("product_form", [True, False])
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_very_negative_logits_leave_the_stick_whole(dtype, product_form):
    q, k, v = shifted_normal(-1000, dtype=dtype, T=40, earlier=70)
    out, remainder = by_kernel(q, k, v, 0.125, product_form=product_form)
    assert not out.any() and (remainder == 1).all()


@pytest.mark.parametrize("product_form", [True, False])
@pytest.mark.parametrize("size", [1e1, 1e3, 1e5])
def test_logits_of_both_signs_and_any_size_stay_finite(size, product_form):
    q, k, v = normal(T=64, earlier=20)
    truth, rest = definition(*map(float64, (size * q, k, v)), 0.125)
    out, remainder = by_kernel(size * q, k, v, 0.125, product_form=product_form)
    theirs, _ = plain(size * q, k, v, 0.125)
    assert error(out, truth) <= 2 * error(theirs, truth) + 2e-7
    assert np.abs(float64(remainder) - rest).max() <= 2e-6


def test_a_key_that_is_not_a_number_is_not_hidden():
    q, k, v = normal(T=20)
    k[:, :, 10, 3] = float("nan")
    out, remainder = by_kernel(q, k, v, 0.125)
    for part in (out.sum(-1), remainder):
        assert mx.array_equal(mx.isnan(part)[0, 0], mx.arange(20) > 10)


# Strides ------------------------------------------------------------------------------------------


@host_only
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_slices_of_a_cache_are_read_in_place(dtype, monkeypatch):
    """Slots behind the keys are NaN, and so is every other head: nothing of them is read."""
    q, k, v = normal(dtype, T=20, earlier=50, heads=(4, 2), B=2)
    buffers = [mx.full((2, 4, 96, 64), float("nan"), dtype) for _ in range(2)]
    for buffer, array in zip(buffers, (k, v), strict=True):
        buffer[:, ::2, :70] = array
    slices = [buffer[:, ::2, :70] for buffer in buffers]
    copied = []
    monkeypatch.setattr(mx, "contiguous", lambda array: copied.append(array.shape) or array)
    expected = by_kernel(q, k, v, 0.125)
    with metal_host.recording() as reports:
        got = by_kernel(q, *slices, 0.125)
    assert all(mx.array_equal(*both) for both in zip(got, expected, strict=True))
    assert reports[0].device_read["k"] == 2 * 4 * 70 * 64 * dtype.size
    assert (2, 2, 70, 64) not in copied


@host_only
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.swapaxes(1, 2),  # as projections come
        lambda a: a.swapaxes(1, 2)[..., ::2],  # every other number
        lambda a: a.swapaxes(1, 2)[..., 3:67],  # that begin anywhere
        lambda a: mx.contiguous(a.transpose(0, 2, 3, 1)).swapaxes(2, 3),
    ],
    ids=["tokens first", "every other", "anywhere", "numbers first"],
)
def test_arrays_of_any_strides(view, dtype, staged):
    shapes = (2, 40, 4, 131), (2, 70, 2, 131), (2, 70, 2, 131)
    arrays = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    q, k, v = (view(array)[..., :64] for array in arrays)
    check((q, k, v, 0.125), blocks=Blocks(32, 32, 8, 1, staged))


# Mistakes that must show --------------------------------------------------------------------------


@host_only
@pytest.mark.parametrize(
    "number, pairs",
    [
        (1, 1),  # the values of a block are read, the next block is written
        (1, 2),  # the same, and a block is written, read
        (2, 1),  # a block is written, read
    ],
)
def test_each_barrier_is_needed(number, pairs, tmp_path, monkeypatch):
    shutil.copytree(KERNEL_FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "stick_breaking" / "attention.metal"
    pieces = file.read_text().split(BARRIER)
    assert len(pieces) == 3
    before, after = BARRIER.join(pieces[:number]), BARRIER.join(pieces[number:])
    file.write_text(f"{before};{after}")
    monkeypatch.setattr(module, "KERNEL", Kernel("stick_breaking/attention.metal", tmp_path))
    for seed in range(5):
        with pytest.raises(metal_host.Fault) as caught, metal_host.recording(seed=seed):
            by_kernel(*normal(T=33, earlier=40), 0.125, blocks=Blocks(32, 16, 8, pairs))
        # whoever reads first reads what nobody wrote yet
        assert caught.value.kind in ("race", "uninitialised read")


@host_only
@pytest.mark.parametrize("pairs", [1, 2])
def test_flags_need_two_places(pairs, tmp_path, monkeypatch):
    """One would be written for this round while a late thread reads the last round's."""
    shutil.copytree(KERNEL_FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "stick_breaking" / "attention.metal"
    text = file.read_text()
    for place in ("first / BK % 2 * 8", "(first / BK + 1) % 2 * 8"):
        assert text.count(place) == 1
        text = text.replace(place, "0")
    if pairs == 1:  # a second barrier stands between there
        text = BARRIER.join(text.split(BARRIER)[:2]) + ";" + text.split(BARRIER)[2]
    file.write_text(text)
    monkeypatch.setattr(module, "KERNEL", Kernel("stick_breaking/attention.metal", tmp_path))
    with pytest.raises(metal_host.Fault) as caught:
        by_kernel(*normal(T=33, earlier=40), 0.125, blocks=Blocks(32, 16, 8, pairs))
    assert caught.value.kind in ("race", "uninitialised read")


@host_only
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("D", module.HEAD_SIZES)
def test_shared_memory_is_what_the_text_declares(D, dtype, staged, monkeypatch):
    """On CUDA the number is an argument, and nothing else would find one that is too small."""
    asked = []
    build = Kernel.build

    def noting(kernel, backend, shared_memory):
        asked.append(shared_memory)
        return build(kernel, backend, shared_memory)

    monkeypatch.setattr(Kernel, "build", noting)
    with metal_host.recording() as reports:
        by_kernel(*normal(dtype, D), scale=0.1, blocks=Blocks(16, 16, 8, 1, staged))
    assert [report.threadgroup_memory for report in reports] == asked


@host_only
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("D", module.HEAD_SIZES)
def test_metal_has_room_for_every_block(D, dtype):
    with metal_host.recording(trace=False) as reports:
        by_kernel(*normal(dtype, D), scale=0.1)
    assert reports[0].threadgroup_memory <= 32 * 1024
