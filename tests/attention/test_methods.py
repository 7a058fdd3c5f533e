"""Every method against the oracle, and the properties that all methods share."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import CASES, error, float64, random_qkv

from mlx_selective import selective_attention, ssa_attention, stick_breaking_attention

#: RMS-relative error allowed: float32 sums, then the rounding of the output's dtype.
TOLERANCE = {"float32": 2e-6, "float16": 5e-4, "bfloat16": 4e-3}
#: SSA rounds the tempered q and v to the dtype and runs MLX's own attention in it.
SSA_TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]

cases = pytest.mark.parametrize("case", CASES, ids=str)
few_examples = settings(max_examples=15, deadline=None)


@cases
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("T", [1, 7, 33, 127])
def test_agrees_with_the_oracle(case, dtype, T):
    (q, k, v), truth = random_qkv(T, T=T, dtype=dtype)
    output = case.run(q, k, v, 0.3, block_size=32)
    assert output.dtype == q.dtype
    tolerance = SSA_TOLERANCE if case.name == "ssa" else TOLERANCE
    assert error(output, case.truth(*truth, 0.3)) < tolerance[dtype]


@cases
@pytest.mark.parametrize("H, Hkv", HEADS)
def test_grouped_heads_are_repeated_heads(case, H, Hkv):
    (q, k, v), truth = random_qkv(H, H=H, Hkv=Hkv, T=13, D=8, Dv=12)
    assert error(case.run(q, k, v, 0.4), case.truth(*truth, 0.4)) < 2e-6


@cases
@pytest.mark.parametrize("D, Dv", [(1, 1), (5, 3), (33, 7), (127, 64)])
def test_odd_head_sizes(case, D, Dv):
    (q, k, v), truth = random_qkv(D, T=33, D=D, Dv=Dv)
    scale = D**-0.5
    assert error(case.run(q, k, v, scale, block_size=16), case.truth(*truth, scale)) < 2e-6


@cases
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("T, D", [(7, 33), (127, 64)])
def test_half_precision_is_the_float32_method_rounded(case, dtype, T, D):
    """The error as a ratio of root mean squares, against plain float32 on the same values."""
    halves, _ = random_qkv(T, T=T, D=D, dtype=dtype)
    exact = case.run(*(a.astype(mx.float32) for a in halves), D**-0.5)
    output = case.run(*halves, D**-0.5)
    assert output.dtype == halves[0].dtype
    tolerance = SSA_TOLERANCE if case.name == "ssa" else TOLERANCE
    assert error(output, float64(exact)) < tolerance[dtype]


@cases
@few_examples
@given(seed=st.integers(0, 99), prefix=st.integers(1, 30), T=st.integers(1, 12), data=st.data())
def test_queries_on_a_prefix_are_the_end_of_the_whole(case, seed, prefix, T, data):
    """Several queries at once against keys before them, and the same queries one by one."""
    (q, k, v), truth = random_qkv(seed, T=prefix + T)
    expected = case.truth(*truth, 0.3)[:, :, prefix:]
    block = data.draw(st.sampled_from([5, 64]))
    own = q[:, :, prefix:]
    several = case.run(own, k, v, 0.3, prefix=prefix, all_queries=q, block_size=block)
    assert error(several, expected) < 1e-5
    for i in range(T):
        end = prefix + i + 1
        one = [q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end]]
        output = case.run(*one, 0.3, prefix=end - 1, all_queries=q)
        assert error(output, expected[:, :, i : i + 1]) < 1e-5


@cases
@few_examples
@given(
    seed=st.integers(0, 99),
    T=st.integers(1, 24),
    pads=st.lists(st.integers(0, 5), min_size=2, max_size=2),
    where=st.sampled_from(["left", "right", "anywhere"]),
    block=st.sampled_from([4, 64]),
)
def test_padding_is_as_if_it_were_not_there(case, seed, T, pads, where, block):
    """Rows with rubbish on their left (or right, or in between) have the outputs of clean rows."""
    (q, k, v), truth = random_qkv(seed, T=T)
    expected = case.truth(*truth, 0.3)
    N, rng = T + max(pads), np.random.default_rng(seed)
    real = np.zeros((2, N), bool)
    for row in range(2):
        slots = {"left": range(N - T, N), "right": range(T)}.get(where)
        real[row, sorted(rng.permutation(N)[:T]) if slots is None else slots] = True
    padded = [np.full((2, a.shape[1], N, a.shape[3]), 40.0, np.float32) for a in (q, k, v)]
    for array, clean in zip(padded, (q, k, v), strict=True):
        for row in range(2):
            array[row, :, real[row]] = np.array(clean)[row].swapaxes(0, 1)
    output = float64(case.run(*map(mx.array, padded), 0.3, real=real, block_size=block))
    assert np.isfinite(output).all()
    for row in range(2):
        assert error(output[row][:, real[row]], expected[row]) < 1e-5


@cases
@few_examples
@given(
    seed=st.integers(0, 99),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    block=st.sampled_from([4, 64]),
)
def test_packed_documents_are_as_if_separate(case, seed, lengths, block):
    """F and sticks stop at the borders; a run of an id that was there before is a new document."""
    (q, k, v), truth = random_qkv(seed, T=sum(lengths))
    ids = mx.array(np.repeat([7, 3, 7, 0][: len(lengths)], lengths))
    output = float64(case.run(q, k, v, 0.3, segment_ids=ids, block_size=block))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = case.truth(*(a[:, :, part] for a in truth), 0.3)
        assert error(output[:, :, part], alone) < 1e-5
        start += length


@cases
@pytest.mark.parametrize("ids", [mx.zeros((5,), mx.int32), mx.zeros((7,)), mx.zeros((3, 7))])
def test_segment_ids_that_do_not_fit_are_told(case, ids):
    (q, k, v), _ = random_qkv(0, T=7)
    function = {"selective": selective_attention, "ssa": ssa_attention}.get(
        case.name, stick_breaking_attention
    )
    extra = (None, None) if case.name == "ssa" else ()
    with pytest.raises(ValueError, match="segment_ids must be integers, one for each of 7 keys"):
        function(q, k, v, *extra, scale=1.0, segment_ids=ids)


@cases
@few_examples
@given(seed=st.integers(0, 99), T=st.integers(1, 40), block=st.integers(1, 48))
def test_blocks_of_queries_change_nothing(case, seed, T, block):
    (q, k, v), _ = random_qkv(seed, T=T)
    whole = case.run(q, k, v, 0.3, block_size=64)
    assert error(case.run(q, k, v, 0.3, block_size=block), float64(whole)) < 2e-6


@cases
@few_examples
@given(seed=st.integers(0, 99), T=st.integers(2, 40), data=st.data())
def test_no_query_sees_the_future(case, seed, T, data):
    """Quite other keys, values and queries later on leave the earlier outputs as they are."""
    (q, k, v), _ = random_qkv(seed, T=T)
    cut = data.draw(st.integers(1, T - 1))
    before = case.run(q, k, v, 0.3, block_size=64)[:, :, :cut]
    future = mx.full((2, 1, T - cut, 1), 50.0)
    q, k, v = (mx.concatenate([a[:, :, :cut], a[:, :, cut:] + future], axis=2) for a in (q, k, v))
    after = case.run(q, k, v, 0.3, block_size=64)[:, :, :cut]
    assert mx.array_equal(before, after)


@cases
def test_rows_of_a_batch_are_independent(case):
    (q, k, v), _ = random_qkv(3, B=2, T=21)
    both = case.run(q, k, v, 0.3)
    for row in range(2):
        one = case.run(q[row : row + 1], k[row : row + 1], v[row : row + 1], 0.3)
        assert error(one, float64(both[row : row + 1])) < 1e-6


@cases
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_huge_logits_stay_finite(case, size):
    (q, k, v), _ = random_qkv(4, T=17)
    output = float64(case.run(q * size, k, v, 1.0))
    assert np.isfinite(output).all()
    assert np.abs(output).max() <= 2.01 * np.abs(float64(v)).max()


@pytest.mark.parametrize(
    "shapes, words",
    [
        (((2, 4, 8), (2, 2, 8, 16), (2, 2, 8, 16)), "four axes"),
        (((2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 9, 16)), "differ in batch, heads or length"),
        (((2, 4, 8, 16), (2, 2, 8, 12), (2, 2, 8, 12)), "batch or head size"),
        (((2, 4, 8, 16), (2, 3, 8, 16), (2, 3, 8, 16)), "multiple"),
        (((2, 4, 9, 16), (2, 2, 8, 16), (2, 2, 8, 16)), "as the 8 keys"),
    ],
)
@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: selective_attention(q, k, v, scale=1.0),
        lambda q, k, v: ssa_attention(q, k, v, None, None, scale=1.0),
        lambda q, k, v: stick_breaking_attention(q, k, v, scale=1.0),
    ],
    ids=["selective", "ssa", "stick_breaking"],
)
def test_wrong_shapes_are_told(function, shapes, words):
    with pytest.raises(ValueError, match=words):
        function(*(mx.zeros(shape) for shape in shapes))


@cases
def test_integers_are_told(case):
    q = mx.zeros((1, 1, 3, 4), mx.int32)
    with pytest.raises(ValueError, match="must be floating"):
        case.run(q, q, q, 1.0)


def test_oracle_is_plain_attention_where_it_should_be():
    """The oracle itself: the three reductions that need no second implementation."""
    _, (q, k, v) = random_qkv(8, H=2, Hkv=1, T=9, D=8)
    plain = oracle.causal_softmax(q, k, v, 0.5)
    quiet = q.copy()
    quiet[:, 0] = 0
    assert np.allclose(
        oracle.selective(quiet, k, v, 0.5)[0], oracle.causal_softmax(quiet, k, v, 0.5)
    )
    ones = np.ones(q.shape[:3])
    assert np.allclose(oracle.ssa(q, k, v, ones, ones[:, :1], 0.5), plain)
    weights, remainder = oracle.stick_breaking(q, k, np.ones((*k.shape[:3], 1)), 0.5)
    assert np.allclose(weights[..., 0] + remainder, 1)
