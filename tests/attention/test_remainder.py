"""What becomes of a stick's remainder, and tiled heads: in a layer, against the oracle."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import oracle
import pytest
from feeding import ROUNDING, feed
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import error, float64, random_qkv
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import BatchKVCache
from mlx_lm.tuner.utils import linear_to_lora_layers
from test_gradients import check_all
from tiny import grafted, stock, tokens

from mlx_selective import UserError, graft, stick_breaking_attention
from mlx_selective.attention import AttentionShape, StickBreaking
from mlx_selective.attention.heads import tile_heads, untile_heads
from mlx_selective.attention.stick_breaking import value_remainder

FORMS = ["none", "value", "head_bias", "head_bias_norm"]
PARAMETERS = ["head_bias", "head_norm.weight", "head_norm.bias"]
#: RMS-relative error allowed: float32 sums, then the rounding of the output's dtype.
TOLERANCE = {"float32": 5e-6, "float16": 5e-4, "bfloat16": 4e-3}

forms = pytest.mark.parametrize("form", FORMS)
groupings = pytest.mark.parametrize("grouping", ["interleaved", "tiled"])
few_examples = settings(max_examples=15, deadline=None)


def random_parameters(form, H, Dv, dtype="float32"):
    """The parameters of a form as MLX arrays of a dtype, and the same rounded values in float64."""
    rng = np.random.default_rng(H * Dv)
    draws = [rng.standard_normal((H, Dv)), rng.uniform(0.5, 1.5, H * Dv), rng.normal(size=H * Dv)]
    count = {"head_bias": 1, "head_bias_norm": 3}.get(form, 0)
    arrays = [mx.array(draw.astype(np.float32)).astype(getattr(mx, dtype)) for draw in draws]
    return arrays[:count], [float64(array) for array in arrays[:count]]


def run(fields, q, k, v, parameters=(), scale=0.4, mask=None):
    """The attention output that a layer of these settings and parameters gives."""
    method, attention = StickBreaking(**fields), nn.Module()
    (B, H, T, D), (_, Hkv, _, Dv) = q.shape, v.shape
    method.install(attention, AttentionShape(8, H, Hkv, D, Dv, D))
    names = [name for name, _ in tree_flatten(attention.parameters())]
    assert sorted(names) == sorted(PARAMETERS[: len(parameters)])
    if parameters:
        attention.update(tree_unflatten(list(zip(PARAMETERS, parameters, strict=False))))
    call = method.call(method, attention, mx.zeros((B, T, 8)), None)
    call.mask = mask
    return call.attend(q, k, v, scale)


@forms
@settings(max_examples=30, deadline=None)
@given(
    T=st.sampled_from([1, 7, 33]),
    D=st.sampled_from([1, 5, 33, 127]),
    Dv=st.sampled_from([1, 5, 16, 33]),
    heads=st.sampled_from([(1, 1), (3, 3), (6, 2), (6, 3), (4, 1)]),
    grouping=st.sampled_from(["interleaved", "tiled"]),
    attend_current=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_every_form_agrees_with_the_oracle(form, T, D, Dv, heads, grouping, attend_current, dtype):
    arrays, truth = random_qkv(T + D, B=1, H=heads[0], Hkv=heads[1], T=T, D=D, Dv=Dv, dtype=dtype)
    parameters, own = random_parameters(form, heads[0], Dv, dtype)
    fields = {"remainder": form, "grouping": grouping, "attend_current": attend_current}
    output = run(fields, *arrays, parameters, D**-0.5)
    assert output.dtype == arrays[0].dtype
    options = {"tiled": grouping == "tiled", "attend_current": attend_current}
    expected = oracle.stick_breaking_heads(*truth, D**-0.5, form, *own, **options)
    assert error(output, expected) < TOLERANCE[dtype]


@forms
def test_127_tokens_in_blocks(form):
    arrays, truth = random_qkv(1, B=2, H=4, Hkv=2, T=127, D=8)
    parameters, own = random_parameters(form, 4, 8)
    expected = oracle.stick_breaking_heads(*truth, 0.2, form, *own, tiled=True)
    output = run({"remainder": form, "grouping": "tiled"}, *arrays, parameters, 0.2)
    assert error(output, expected) < TOLERANCE["float32"]


@forms
@groupings
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rounds_once_at_the_end(form, grouping, dtype):
    halves, _ = random_qkv(4, H=4, Hkv=2, T=33, D=8, dtype=dtype)
    parameters, _ = random_parameters(form, 4, 8, dtype)
    fields = {"remainder": form, "grouping": grouping}
    exact = run(fields, *(a.astype(mx.float32) for a in halves), parameters)
    assert mx.array_equal(run(fields, *halves, parameters), exact.astype(halves[0].dtype))


def test_the_first_token_has_its_remainder_only():
    """Its stick is whole: the output is its value, or the bias, or the bias normalised."""
    (q, k, v), _ = random_qkv(2, B=1, H=4, Hkv=2, T=1, D=8)
    (bias, weight, shift), _ = random_parameters("head_bias_norm", 4, 8)
    assert not run({}, q, k, v).any()
    assert mx.array_equal(run({"remainder": "value"}, q, k, v), mx.repeat(v, 2, axis=1))
    tiled = run({"remainder": "value", "grouping": "tiled"}, q, k, v)
    assert mx.array_equal(tiled, mx.tile(v, (1, 2, 1, 1)))
    assert mx.array_equal(run({"remainder": "head_bias"}, q, k, v, [bias])[0, :, 0], bias)
    normal = nn.GroupNorm(4, 32, pytorch_compatible=True)
    normal.weight, normal.bias = weight, shift
    output = run({"remainder": "head_bias_norm"}, q, k, v, [bias, weight, shift])
    assert mx.allclose(output.reshape(1, 32), normal(bias.reshape(1, 32)), atol=1e-5)


@given(groups=st.integers(1, 5), each=st.integers(1, 5))
def test_untiled_heads_stand_by_the_key_head_they_share(groups, each):
    tiled = np.tile(np.arange(groups), each)
    x = mx.array(tiled)[None, :, None] + mx.zeros((2, 1, 3), mx.int32)
    untiled = untile_heads(x, groups)
    assert np.array_equal(np.array(untiled)[1, :, 2], np.repeat(np.arange(groups), each))
    numbers = mx.arange(2 * groups * each * 6).reshape(2, groups * each, 3, 2)
    assert mx.array_equal(tile_heads(untile_heads(numbers, groups), groups), numbers)


@forms
@groupings
@few_examples
@given(seed=st.integers(0, 99), prefix=st.integers(1, 20), T=st.integers(1, 9))
def test_queries_on_a_prefix_are_the_end_of_the_whole(form, grouping, seed, prefix, T):
    (q, k, v), _ = random_qkv(seed, H=6, Hkv=2, T=prefix + T, D=5)
    parameters, _ = random_parameters(form, 6, 5)
    fields = {"remainder": form, "grouping": grouping}
    whole = float64(run(fields, q, k, v, parameters))
    several = run(fields, q[:, :, prefix:], k, v, parameters)
    assert error(several, whole[:, :, prefix:]) < 1e-5
    for end in range(prefix + 1, prefix + T + 1):
        one = run(fields, q[:, :, end - 1 : end], k[:, :, :end], v[:, :, :end], parameters)
        assert error(one, whole[:, :, end - 1 : end]) < 1e-5


@forms
@groupings
def test_padding_on_the_left_is_as_if_it_were_not_there(form, grouping):
    (q, k, v), _ = random_qkv(5, B=2, H=6, Hkv=3, T=9)
    parameters, _ = random_parameters(form, 6, 16)
    fields, pads = {"remainder": form, "grouping": grouping}, [0, 4]
    mask = (mx.arange(9)[None] >= mx.array(pads)[:, None])[:, None, None]
    both = run(fields, q, k, v, parameters, mask=mask)
    for row, n in enumerate(pads):
        one = [array[row : row + 1, :, n:] for array in (q, k, v)]
        alone = run(fields, *one, parameters)
        assert error(both[row : row + 1, :, n:], float64(alone)) < 1e-5


@few_examples
@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 9), min_size=2, max_size=4))
def test_packed_documents_keep_their_own_remainders(seed, lengths):
    (q, k, v), _ = random_qkv(seed, T=sum(lengths))

    def with_value(q, k, v, ids):
        output, remainder = stick_breaking_attention(q, k, v, scale=0.4, segment_ids=ids)
        return float64(output + value_remainder(remainder, v)), float64(remainder)

    packed = with_value(q, k, v, mx.array(np.repeat(range(len(lengths)), lengths)))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = with_value(*(array[:, :, part] for array in (q, k, v)), None)
        for one, all_of_them in zip(alone, packed, strict=True):
            assert error(all_of_them[:, :, part], one) < 1e-5
        start += length


@forms
@groupings
@pytest.mark.parametrize("attend_current", [False, True])
def test_gradients_of_every_argument(form, grouping, attend_current):
    parameters, own = random_parameters(form, 4, 3)
    options = {"tiled": grouping == "tiled", "attend_current": attend_current}
    fields = {"remainder": form, "grouping": grouping, "attend_current": attend_current}

    def ours(q, k, v, *rest):
        return (run(fields, q, k, v, rest, 0.7),)

    def truth(q, k, v, *rest):
        return (oracle.stick_breaking_heads(q, k, v, 0.7, form, *rest, **options),)

    draws = [random_qkv(seed, B=1, H=4, Hkv=2, T=6, D=3) for seed in range(3, 6)]
    check_all((ours, truth, [*some, *parameters], [*more, *own]) for some, more in draws)


# In a model ---------------------------------------------------------------------------------------


def of(form, grouping="interleaved"):
    return {"kind": "stick_breaking", "remainder": form, "grouping": grouping}


families = pytest.mark.parametrize("family", ["llama", "granite"])


@families
@forms
@groupings
def test_cached_and_chunked_are_the_whole(family, form, grouping):
    model, ids = grafted(family, of(form, grouping)), tokens(2, 33)
    whole = model(ids)
    for chunks in ([33], [1] * 33, [16, 1, 7, 9]):
        logits, _ = feed(model, ids, chunks)
        assert mx.abs(logits - whole).max() < ROUNDING * mx.abs(whole).max()


@forms
def test_every_form_and_grouping_is_another_model(form):
    ids = tokens(1, 12)
    logits = grafted("llama", of(form))(ids)
    others = [of(other) for other in FORMS if other != form] + [of(form, "tiled")]
    for other in others:
        assert mx.abs(grafted("llama", other)(ids) - logits).max() > 1e-3


@forms
@groupings
def test_rows_of_mlx_lms_batch_cache_are_as_alone(form, grouping):
    model, pads, ids = grafted("granite", of(form, grouping)), [0, 3, 9], tokens(3, 20)
    cache = [BatchKVCache(pads) for _ in model.layers]
    together, _ = feed(model, ids, [12, 1, 1, 6], cache)
    for row, n in enumerate(pads):
        alone, _ = feed(model, ids[row : row + 1, n:], [12 - n, 1, 1, 6])
        assert mx.abs(together[row, n:] - alone[0]).max() < ROUNDING * mx.abs(alone).max()


def test_a_fresh_bias_adds_nothing():
    ids = tokens(1, 9)
    plain = graft(stock("llama"), of("none"))(ids)
    assert mx.array_equal(graft(stock("llama"), of("head_bias"))(ids), plain)


@forms
def test_lora_and_quantisation_leave_the_parameters_alone(form):
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model, ids = grafted("llama", of(form), **sizes), tokens(1, 9)
    before = model(ids)
    own = {
        name: value
        for name, value in tree_flatten(model.parameters())
        if any(part in name for part in PARAMETERS)
    }
    assert len(own) == 3 * {"head_bias": 1, "head_bias_norm": 3}.get(form, 0)
    linear_to_lora_layers(model, 3, {"rank": 2, "scale": 1.0, "dropout": 0.0})
    assert mx.array_equal(model(ids), before)
    assert sum("lora_a" in name for name, _ in tree_flatten(model.parameters())) == 3 * 7
    model = grafted("llama", of(form), **sizes)
    nn.quantize(model, 32, 8)
    after = dict(tree_flatten(model.parameters()))
    assert all(mx.array_equal(after[name], value) for name, value in own.items())
    assert mx.isfinite(model(ids)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@forms
def test_a_model_in_half_precision_stays_in_it(form, dtype):
    model, ids = grafted("llama", of(form)), tokens(1, 9)
    exact = model(ids)
    model.set_dtype(getattr(mx, dtype))
    logits = model(ids)
    assert logits.dtype == getattr(mx, dtype)
    assert error(logits, float64(exact)) < 0.1


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"remainder": "bias"},
            "attention.remainder must be one of none, value, head_bias, head_bias_norm, got 'bias'",
        ),
        ({"remainder": True}, "attention.remainder must be one of .*, got True"),
        ({"remainder": ["value"]}, r"got \['value'\]"),
        ({"grouping": "tile"}, "attention.grouping must be one of interleaved, tiled, got 'tile'"),
    ],
)
def test_wrong_settings_are_told(fields, words):
    with pytest.raises(UserError, match=words):
        grafted("llama", {"kind": "stick_breaking", **fields})
