"""SSA: every token map and position map against the oracle, and what holds for all of them."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from methods import error, float64, random_qkv
from mlx.utils import tree_flatten
from ssa_settings import MAPS, PARTS, Setting, attend, truth
from test_gradients import check, check_all

from mlx_selective.attention.ssa import (
    Temperature,
    apply_temperature,
    position_temperature,
    released_position_temperature,
    ssa_attention,
    token_temperature,
)
from mlx_selective.attention.visibility import document_positions

#: RMS-relative error allowed; MLX's attention rounds the tempered arrays to the dtype.
TOLERANCE = {"float32": 5e-6, "float16": 4e-3, "bfloat16": 3e-2}

all_maps = pytest.mark.parametrize("maps", MAPS, ids="-".join)
few_examples = settings(max_examples=6, deadline=None)


@all_maps
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("T, D, Dv", [(1, 7, 5), (7, 1, 1), (33, 127, 33), (127, 33, 7)])
def test_agrees_with_the_oracle(maps, dtype, T, D, Dv):
    setting = Setting(maps, T, T=T, D=D, Dv=Dv, dtype=dtype)
    output = setting.run(D**-0.5, block_size=32)
    assert output.dtype == getattr(mx, dtype)
    assert error(output, setting.truth(D**-0.5)) < TOLERANCE[dtype]


@all_maps
@few_examples
@given(
    T=st.integers(1, 40),
    C=st.sampled_from([1, 7, 33]),
    D=st.sampled_from([1, 5, 8, 33]),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    seed=st.integers(0, 99),
)
def test_temperatures_agree_with_the_oracle(maps, T, C, D, heads, seed):
    H, Hkv = heads
    setting = Setting(maps, seed, H=H, Hkv=Hkv, T=T, C=C, D=D)
    first = 1 + seed  # as after so many cached tokens
    count = mx.arange(first, first + T)
    counts = np.broadcast_to(np.array(count), (2, T))
    for tau, projected, own in zip(
        setting.taus(setting.x, setting.qkv, count),
        setting.qkv64,
        setting.parameters(),
        strict=True,
    ):
        assert tau.dtype == mx.float32
        expected = oracle.ssa_tau(setting.x64, projected, counts, maps[0], **own)
        tau = np.broadcast_to(np.array(tau), expected.shape).astype(np.float64)
        assert error(tau, expected) < 2e-6


@all_maps
def test_fresh_temperatures_are_exactly_one_and_have_gradients(maps):
    """Every parameter has a gradient, but for the first layer of mlp, which follows the second."""
    fresh = Temperature(4, 8, 6, *maps)
    x, projected = mx.random.normal((2, 7, 8)), mx.random.normal((2, 4, 7, 6))
    count = mx.arange(1, 8) * 1000
    assert mx.all(fresh(x, projected, count) == 1).item()

    def loss(parameters):
        fresh.update(parameters)
        return (fresh(x, projected, count) * projected[..., 0]).sum()

    gradients = dict(tree_flatten(mx.grad(loss)(fresh.trainable_parameters())))
    assert gradients.keys() == dict(tree_flatten(fresh.parameters())).keys()
    for name, gradient in gradients.items():
        floor = {"weight": 1e-3, "hidden": -1, "alpha": 1e-9, "beta": 1e-9}[name]
        assert mx.abs(gradient).max() > floor, name


@all_maps
@few_examples
@given(T=st.sampled_from([1, 7, 33]), data=st.data())
def test_chunks_are_the_whole(maps, T, data):
    """Also one by one: each chunk tempers its own tokens, the cache holds tempered keys."""
    setting = Setting(maps, T, T=T)
    borders = data.draw(st.sets(st.integers(1, T), max_size=5)) if T > 1 else set()
    chunks = data.draw(st.sampled_from([[0, *sorted(borders - {T}), T], list(range(T + 1))]))
    keys, values, outputs = [], [], []
    for start, end in zip(chunks, chunks[1:], strict=False):
        q, k, v = (array[:, :, start:end] for array in setting.qkv)
        x, count = setting.x[:, start:end], mx.arange(start + 1, end + 1)
        tau_q, tau_k, tau_v = setting.taus(x, (q, k, v), count)
        keys.append(apply_temperature(k, tau_k))
        values.append(apply_temperature(v, tau_v))
        cached = mx.concatenate(keys, axis=2), mx.concatenate(values, axis=2)
        outputs.append(ssa_attention(q, *cached, tau_q, None, scale=0.5))
    assert error(mx.concatenate(outputs, axis=2), float64(setting.run())) < 3e-6


@all_maps
@few_examples
@given(T=st.integers(2, 33), data=st.data())
def test_no_query_sees_the_future(maps, T, data):
    """Quite other tokens later on: input, queries, keys and values."""
    setting, cut = Setting(maps, T, T=T), data.draw(st.integers(1, T - 1))
    later = mx.arange(T) >= cut
    x = mx.where(later[:, None], -5 * setting.x, setting.x)
    qkv = [mx.where(later[:, None], 30 - array, array) for array in setting.qkv]
    assert mx.array_equal(setting.run(x=x, qkv=qkv)[:, :, :cut], setting.run()[:, :, :cut])


@all_maps
@few_examples
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), block=st.sampled_from([4, 64]))
def test_packed_documents_are_separate_documents(maps, lengths, block):
    T = sum(lengths)
    setting = Setting(maps, T, T=T)
    ids = mx.array(np.repeat(np.arange(len(lengths)), lengths))
    count = document_positions(ids) + 1
    packed = setting.run(count=count, segment_ids=ids, block_size=block)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        qkv = [array[:, :, own] for array in setting.qkv]
        alone = setting.run(x=setting.x[:, own], qkv=qkv)
        assert error(packed[:, :, own], float64(alone)) < 3e-6
        start += length


@all_maps
@pytest.mark.parametrize("pads", [[0, 3], [8, 1]])
def test_left_padding_is_not_there(maps, pads):
    setting = Setting(maps, T=9)
    real = mx.arange(9) >= mx.array(pads)[:, None]
    count = mx.maximum(mx.arange(1, 10) - mx.array(pads)[:, None], 1)
    together = setting.run(count=count, mask=real[:, None, None])
    for row, pad in enumerate(pads):
        qkv = [array[row : row + 1, :, pad:] for array in setting.qkv]
        alone = setting.run(x=setting.x[row : row + 1, pad:], qkv=qkv)
        assert error(together[row : row + 1, :, pad:], float64(alone)) < 3e-6


@all_maps
def test_grouped_heads_are_repeated_heads(maps):
    grouped = Setting(maps, H=6, Hkv=2, D=5, Dv=3)
    repeated = Setting(maps, H=6, Hkv=6, D=5, Dv=3)
    q, k, v = grouped.qkv
    for part, own in repeated.temperatures.items():
        for name, value in tree_flatten(grouped.temperatures[part].parameters()):
            by_head = part != "query" and name in ("weight", "alpha") and value.shape[0] == 2
            own[name] = mx.repeat(value, 3, axis=0) if by_head else value
    qkv = [q, mx.repeat(k, 3, axis=1), mx.repeat(v, 3, axis=1)]
    output = repeated.run(x=grouped.x, qkv=qkv)
    assert error(output, float64(grouped.run())) < 2e-6


@all_maps
@pytest.mark.parametrize("block_size", [64, 3], ids=["one block", "recomputed blocks"])
def test_gradients_of_every_argument_and_parameter(maps, block_size):
    """Against finite differences of the oracle, for x, q, k, v and all three temperatures."""
    check_all(gradient_problem(maps, block_size, seed) for seed in range(10))


def gradient_problem(maps, block_size, seed):
    """What runs, its truth, and the arguments of both: x where it is read, q, k, v, parameters."""
    setting = Setting(maps, seed, B=1, H=2, Hkv=1, T=5, C=3, D=4, Dv=3)
    scale = 0.2  # no weight so near 1 that float32 has no slope to compare
    reads_x = maps[0] in ("linear", "mlp")
    names = [
        (part, name)
        for part, own in setting.temperatures.items()
        for name, _ in tree_flatten(own.parameters())
    ]

    def run(*arguments):
        x, q, k, v, *parameters = arguments if reads_x else (setting.x, *arguments)
        for (part, name), value in zip(names, parameters, strict=True):
            setting.temperatures[part][name] = value
        return (setting.run(scale, x=x, qkv=(q, k, v), block_size=block_size),)

    def float64_run(*arguments):
        x, q, k, v, *parameters = arguments if reads_x else (setting.x64, *arguments)
        own = {part: {} for part in PARTS}
        for (part, name), value in zip(names, parameters, strict=True):
            own[part][name] = value
        return (truth(maps[0], x, q, k, v, own.values(), scale),)

    arrays = [*([setting.x] if reads_x else []), *setting.qkv]
    arrays += [setting.temperatures[part][name] for part, name in names]
    truths = [*([setting.x64] if reads_x else []), *setting.qkv64]
    truths += [setting.parameters()[PARTS.index(part)][name] for part, name in names]
    return run, float64_run, arrays, truths


def test_gradients_of_all_three_temperatures():
    setting = Setting(("linear", "alpha"), B=1, H=2, Hkv=1, T=6, D=4)
    taus = setting.taus(setting.x, setting.qkv, mx.arange(1, 7))

    def float64_run(q, k, v, tau_q, tau_k, tau_v):
        return (oracle.ssa(q, k * tau_k[..., None], v, tau_q, tau_v, 0.5),)

    check(
        lambda *arrays: (attend(*arrays, 0.5, block_size=4),),
        float64_run,
        [*setting.qkv, *taus],
        [*setting.qkv64, *map(float64, taus)],
    )


def test_paper_form_agrees_with_the_oracle():
    rng = np.random.default_rng(0)
    x, weight, alpha = (rng.standard_normal(s).astype(np.float32) for s in ((2, 9, 8), (4, 8), 4))
    count = mx.arange(6, 15)  # positions 5 .. 14, as after five cached tokens
    tau = position_temperature(count, mx.array(alpha)) + token_temperature(
        mx.array(x), mx.array(weight)
    )
    expected = oracle.ssa_temperature(
        x.astype(np.float64), weight.astype(np.float64), alpha.astype(np.float64), np.arange(5, 14)
    )
    assert error(tau, expected) < 1e-6


@pytest.mark.parametrize("beta, coefficient", [(2.0, 0.000618), (1.5, 0.0113), (0.0, 0.368)])
def test_released_form(beta, coefficient):
    """1 + exp(-exp(beta)) ln n; the coefficients at the released inits are published."""
    tau = released_position_temperature(mx.array([1, 2, 100]), mx.array(beta))
    assert tau.shape == (1, 1, 3)
    assert np.exp(-np.exp(beta)) == pytest.approx(coefficient, rel=2e-3)
    expected = 1 + np.exp(-np.exp(beta)) * np.log([1, 2, 100])
    assert np.allclose(np.array(tau)[0, 0], expected, rtol=1e-6)


def test_first_token_has_no_position_part():
    alpha = mx.array([9.0, -9.0])
    assert np.allclose(np.array(position_temperature(mx.array([1]), alpha)), 1)


def test_temperature_commutes_with_rope_but_not_with_a_norm():
    (q, _, _), _ = random_qkv(0, T=5)
    tau = mx.random.uniform(0.5, 2, q.shape[:3])
    rope = lambda x: mx.fast.rope(x, 16, traditional=False, base=1e4, scale=1.0, offset=3)  # noqa: E731
    before, after = rope(apply_temperature(q, tau)), apply_temperature(rope(q), tau)
    assert error(before, float64(after)) < 1e-6
    norm = lambda x: mx.fast.rms_norm(x, None, 1e-6)  # noqa: E731
    assert error(norm(apply_temperature(q, tau)), float64(apply_temperature(norm(q), tau))) > 0.1


def test_ones_are_plain_attention_to_the_bit():
    (q, k, v), _ = random_qkv(1, T=33)
    ones = mx.ones(q.shape[:3])
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")
    assert mx.array_equal(attend(q, k, v, ones, ones[:, :2], ones[:, :2], 0.3), plain)
    assert mx.array_equal(ssa_attention(q, k, v, None, None, scale=0.3), plain)


def test_temperatures_may_have_an_axis_for_the_head_size():
    (q, k, v), _ = random_qkv(1, T=9)
    tau_q, tau_k, tau_v = (mx.random.uniform(0.5, 2, a.shape[:3]) for a in (q, k, v))
    flat = attend(q, k, v, tau_q, tau_k, tau_v, 0.3)
    assert mx.array_equal(
        attend(q, k, v, *(tau[..., None] for tau in (tau_q, tau_k, tau_v)), 0.3), flat
    )
    shared = ssa_attention(q, k, v, tau_q[:, :1], None, scale=0.3)
    repeated = mx.broadcast_to(tau_q[:, :1], tau_q.shape)
    assert mx.array_equal(ssa_attention(q, k, v, repeated, None, scale=0.3), shared)


def test_count_may_differ_by_row():
    alpha = mx.array([0.3])
    both = position_temperature(mx.array([[1, 2], [8, 9]]), alpha)
    assert both.shape == (2, 1, 2)
    assert error(both[1:], float64(position_temperature(mx.array([8, 9]), alpha))) < 1e-6
