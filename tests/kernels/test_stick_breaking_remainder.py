"""Stick-breaking's remainder in half precision: kernels run, and nothing is rounded before it."""

import mlx.core as mx
import oracle
import pytest
from feeding import feed, left_padded_cache
from methods import error, float64
from place import BACKEND, FLOORS, launching
from stick_breaking_cases import definition, normal, shifted
from test_methods_through_kernels import CHUNKS, STICKS, plainly
from test_remainder import FORMS, random_parameters, run
from tiny import grafted, tokens

from mlx_selective import stick_breaking_attention
from mlx_selective.kernels import outputs_start_as, record

HALVES = [mx.float16, mx.bfloat16]
#: weights and outputs are both rounded on CUDA
ROUNDED = {dtype: (1 + (BACKEND == "cuda")) * floor for dtype, floor in FLOORS.items()}
halves = pytest.mark.parametrize("dtype", HALVES, ids=str)
forms = pytest.mark.parametrize("form", FORMS)


def lasting(dtype, queries, earlier):
    """q, k and v whose sticks leave something."""
    q, k, v = normal(dtype, 64, queries, earlier, (4, 2))
    return *shifted(q, k, -4 * 8), v


def layer(monkeypatch, fields, parameters, arrays, queries=33):
    """A layer's output through kernels, and in plain MLX in float32, which is rounded once."""

    def output(q, k, v):
        return run(fields, q[:, :, -queries:], k, v, parameters, 0.125)

    with launching(), record() as ran:
        ours = output(*arrays)
        mx.eval(ours)
    assert [one.backend for one in ran] == [BACKEND]
    exact = plainly(monkeypatch, lambda: output(*(array.astype(mx.float32) for array in arrays)))
    return ours, exact.astype(ours.dtype)


@halves
@pytest.mark.parametrize("queries, keys", [(9, 40), (1, 40), (1, 700)])
def test_a_float32_output_is_the_same_before_it_is_rounded(queries, keys, dtype):
    arrays = lasting(dtype, queries, keys - queries)
    options = {"scale": 0.125, "begins": mx.array([3])}
    with launching(), outputs_start_as(float("nan")), record() as ran:
        rounded, left = stick_breaking_attention(*arrays, **options)
        exact, same = stick_breaking_attention(*arrays, output_dtype=mx.float32, **options)
        mx.eval(rounded, exact)
    assert {one.backend for one in ran} == {BACKEND}
    assert (rounded.dtype, exact.dtype) == (dtype, mx.float32) and mx.array_equal(left, same)
    assert mx.array_equal(exact.astype(dtype), rounded) and not mx.array_equal(exact, rounded)
    truth, _ = definition(*map(float64, arrays), 0.125, begins=[3])
    assert error(exact, truth) < (ROUNDED[dtype] if BACKEND == "cuda" else 1e-6)


@halves
@forms
@pytest.mark.parametrize("grouping", ["interleaved", "tiled"])
@pytest.mark.parametrize("queries", [33, 1])
def test_a_layer_agrees_with_the_oracle(queries, grouping, form, dtype, monkeypatch):
    arrays = lasting(dtype, 33, 0)
    parameters, own = random_parameters(form, 4, 64, str(dtype).removeprefix("mlx.core."))
    fields = {"remainder": form, "grouping": grouping}
    ours, once = layer(monkeypatch, fields, parameters, arrays, queries)
    options = {"tiled": grouping == "tiled"}
    truth = oracle.stick_breaking_heads(*map(float64, arrays), 0.125, form, *own, **options)
    truth = truth[:, :, -queries:]
    most = 1.01 * error(once, truth) + (BACKEND == "cuda") * FLOORS[dtype]
    assert ours.dtype == dtype and error(ours, truth) <= most


@halves
def test_norms_do_not_enlarge_what_was_rounded(dtype, monkeypatch):
    """Values that have much in common: the norm takes that away, and leaves rounding errors."""
    form, (q, k, v) = "head_bias_norm", lasting(dtype, 33, 0)
    arrays, (parameters, own) = (q, k, (v + 3).astype(dtype)), random_parameters(form, 4, 64)
    ours, once = layer(monkeypatch, {"remainder": form}, parameters, arrays)
    truth = oracle.stick_breaking_heads(*map(float64, arrays), 0.125, form, *own)
    # CUDA's own weights are rounded, if not the output
    assert error(ours, truth) <= (8 if BACKEND == "cuda" else 1.01) * error(once, truth)


@halves
@forms
def test_a_model_in_half_precision(form, dtype, monkeypatch):
    """A left-padded batch in chunks, then tokens: kernels alone, as near to float32 as without."""
    attention = {"kind": "stick_breaking", "remainder": form}
    model, ids, pads = grafted("llama", attention, hidden_size=256), tokens(2, sum(CHUNKS)), [0, 5]
    model.set_dtype(dtype)

    def logits():
        return feed(model, ids, CHUNKS, left_padded_cache(model, pads))[0]

    with launching(), record() as ran:
        ours = logits()
        mx.eval(ours)
    assert {one.kernel for one in ran} == set(STICKS) and {one.backend for one in ran} == {BACKEND}
    assert ours.dtype == dtype
    plain = plainly(monkeypatch, logits)
    model.set_dtype(mx.float32)
    exact = float64(plainly(monkeypatch, logits))
    assert error(ours, exact) <= 2 * error(plain, exact)


@pytest.mark.parametrize("queries", [1, 9])
@halves
def test_gradients_are_those_of_the_definition(dtype, queries, monkeypatch):
    arrays = lasting(dtype, queries, 20)

    def gradients():
        def loss(*arrays):
            options = {"scale": 0.125, "output_dtype": mx.float32}
            out, left = stick_breaking_attention(*arrays, **options)
            return (mx.sin(out) * out).sum() + left.sum()

        return mx.grad(loss, (0, 1, 2))(*arrays)

    with launching():
        ours = gradients()
        mx.eval(ours)
    for one, other in zip(ours, plainly(monkeypatch, gradients), strict=True):
        assert one.dtype == dtype and error(one, float64(other)) <= ROUNDED[dtype]


@pytest.mark.parametrize("dtype", [mx.int32, mx.float64, "float32"], ids=str)
def test_output_dtypes_that_are_none(dtype):
    with pytest.raises(ValueError, match="output_dtype must be one of"):
        stick_breaking_attention(*normal(), scale=0.125, output_dtype=dtype)
