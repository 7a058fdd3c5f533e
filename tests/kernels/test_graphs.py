"""Graphs that are kept: traced once a thread, right for other arrays, with derivatives."""

import gc
import re
import shutil
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx
import pytest
from place import graphs_kept

from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.attention.selective.definition import plain_selective, selective_step
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels import Backend, choice, record
from mlx_selective.kernels import selective as selective_prompt
from mlx_selective.kernels import selective_decode as selective
from mlx_selective.kernels import stick_breaking as stick_prompt
from mlx_selective.kernels import stick_breaking_decode as sticks
from mlx_selective.kernels.gradient import with_gradient_of
from mlx_selective.kernels.graphs import KEPT, Graphs, are_traced


@pytest.fixture(autouse=True)
def compiling():
    """Other tests do without."""
    if mx.default_device() == mx.cpu and shutil.which("g++") is None:
        pytest.skip("MLX compiles with g++ on the CPU")
    with graphs_kept():
        first = mx.compile(lambda x: mx.contiguous(x))
        # MLX traces a process's first graph twice
        mx.eval([first(mx.zeros((2,))) for _ in range(2)])
        yield


@pytest.fixture
def traced():
    """Which factor was traced, or called, in order."""
    return []


@pytest.fixture
def times(traced):
    """Graphs that multiply by their setting; the derivative is said to be ten times as large."""

    def make(factor):
        def forward(x):
            traced.append(factor)
            return [x @ matrix(x, factor)]

        return forward, with_gradient_of(lambda x: [x @ matrix(x, 10 * factor)], forward)

    def matrix(x, factor):
        # matrix products are not fused: no graph has to be compiled by g++
        size = range(len(x))
        return mx.array([[factor * (i == j) for i in size] for j in size], x.dtype)

    return Graphs(make)


def test_a_graph_is_traced_once_for_each_setting_and_shape(times, traced):
    for _ in range(3):
        for factor in (2, 3):
            for x in (mx.array([1.0, 4.0]), mx.array([5.0, 7.0])):
                assert times(factor)(x)[0].tolist() == [n * factor for n in x.tolist()]
    assert traced == [2, 3]
    assert times(2)(mx.array([1.0]))[0].tolist() == [2]
    assert traced == [2, 3, 2]


def test_derivatives_and_outer_graphs(times, traced):
    x = mx.array([1.0, 4.0])
    for _ in range(2):  # before and after it was traced
        assert mx.grad(lambda x: times(3)(x)[0].sum())(x).tolist() == [30, 30]
        assert mx.compile(lambda x: times(3)(x)[0] + 1)(x).tolist() == [4, 13]
        assert mx.compile(mx.grad(lambda x: times(3)(x)[0].sum()))(x).tolist() == [30, 30]
        assert times(3)(x)[0].tolist() == [3, 12]


def test_graphs_hold_launches_without_what_derivatives_need(times):
    """Each custom function, and each stop of a gradient, would take time at every call."""
    x = mx.array([1.0, 4.0])
    times(2)(x)  # traced
    for compiled, names in ((True, {"Matmul"}), (False, {"Matmul", "CustomTransforms"})):
        with nullcontext() if compiled else record():
            out = times(2)(x)[0]
        with tempfile.NamedTemporaryFile("w+", suffix=".dot") as file:
            mx.export_to_dot(file.name, out)
            shown = set(re.findall(r'label ?= ?"(\w+)"', Path(file.name).read_text()))
        assert names <= shown and ("CustomTransforms" in shown) == (not compiled)


def test_who_is_traced():
    x = mx.array([1.0])
    seen = {}

    def look(name):
        def function(x):
            seen[name] = are_traced([mx.array([2.0]), x])
            return (x * x).sum()

        return function

    assert not are_traced([x, x + 1, mx.eval(x * 2) or x])
    look("nothing")(x)
    mx.grad(look("grad"))(x)
    mx.jvp(lambda x: [look("jvp")(x)], [x], [x])
    mx.vmap(look("vmap"))(x[None])
    mx.compile(look("compile"))(x)
    mx.checkpoint(look("checkpoint"))(x)
    mx.grad(mx.checkpoint(look("grad of a checkpoint")))(x)
    assert not seen.pop("nothing") and not seen.pop("checkpoint")
    assert all(seen.values()) and len(seen) == 5


def test_each_thread_and_stream_has_its_own(times, traced):
    def work():
        with mx.stream(mx.new_stream(mx.cpu)):
            results.append(times(2)(mx.array([3.0]))[0].tolist())
            results.append(times(2)(mx.array([4.0]))[0].tolist())

    results = []
    for _ in range(3):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [[6.0], [8.0]] * 3
    assert traced == [2, 2, 2]
    assert times(2)(mx.array([5.0]))[0].tolist() == [10]


def test_no_graph_is_found_by_another_function(times):
    """MLX knows a graph by an address, which is given away again once its function is gone."""
    for factor in range(4 * KEPT):
        gc.collect(0)
        assert times(factor)(mx.array([1.0]))[0].item() == factor


def test_who_watches_sees_each_call(times, traced):
    x = mx.array([1.0])
    times(2)(x)
    with record():
        assert [times(2)(x)[0].item() for _ in range(2)] == [2, 2]
    assert traced == [2] * 3
    times(2)(x)
    assert traced == [2] * 3


# The two kernels for one token, with their launches in plain MLX ---------------------------------


@pytest.fixture
def launches(monkeypatch):
    """Plain MLX stands in for launches, as lazily; gives how often one was built."""
    built = []

    def decode(kernels, backend, dtype, shape, keys_shape, scale):
        def first(q, k, v, F, key_positions, own, evicts):
            built.append("selective")
            assert (q.shape, k.shape[1:3], q.dtype) == (shape, keys_shape, dtype)
            own = own[:, :1]
            out, after = selective_definition(q, k, v, F, scale, own, key_positions)
            slot = mx.argmax(after, axis=1, keepdims=True) * evicts[: len(q), None]
            return out, slot, after

        return first, None

    def stick(kernels, backend, dtypes, shape, keys_shape, end, scale):
        def first(q, k, v, begins):
            built.append("stick-breaking")
            current = end == k.shape[2]
            begins = begins[: len(q)]
            return stick_definition(q, k, v, scale, current, begins)

        return first, None

    monkeypatch.setattr(choice, "find_backend", lambda: Backend("metal"))
    monkeypatch.setattr(selective, "_prepare", decode)
    monkeypatch.setattr(sticks, "_prepare", stick)
    return built


def selective_definition(q, k, v, F, scale, own, positions):
    state = {"query_positions": own, "key_positions": positions, "remaining": False}
    return plain_selective(q, k, v, F, scale=scale, documents=None, block_size=1, **state)


def stick_definition(q, k, v, scale, attend_current, begins):
    return plain_stick_breaking(q, k, v, scale=scale, attend_current=attend_current, begins=begins)


def arrays(seed, N, B=2):
    """q, k, v, and of a cache F, own positions and positions, all of them others for each seed."""
    keys = mx.random.split(mx.random.key(seed), 5)
    shapes = [(B, 4, 1, 64), (B, 2, N + seed, 64), (B, 2, N + seed, 64)]
    q, k, v = (mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=False))
    positions = mx.argsort(mx.random.uniform(shape=(B, N), key=keys[3]), axis=1).astype(mx.int32)
    F = mx.random.uniform(shape=(B, N), key=keys[4])
    return q, k[:, :, :N], v[:, :, :N], F, positions.max(axis=1, keepdims=True), positions


def test_one_graph_serves_other_arrays_of_a_cache(launches):
    for seed in range(4):
        q, k, v, F, own, positions = arrays(seed, 33)
        evicts = [seed % 2, 1]
        state = {"query_positions": own, "key_positions": positions}
        out, after, slots = selective_step(q, k, v, scale=0.1, F=F, evicts=evicts, **state)
        expected, then = selective_definition(q, k, v, F, 0.1, own, positions)
        assert mx.allclose(out, expected, atol=1e-6) and mx.allclose(after, then, atol=1e-6)
        assert slots[:, 0].tolist() == (mx.argmax(then, axis=1) * mx.array(evicts)).tolist()
    assert launches == ["selective"]
    q, k, v, F, own, positions = arrays(0, 34)
    state = {"F": F, "query_positions": own, "key_positions": positions}
    selective_step(q, k, v, scale=0.1, evicts=[1, 1], **state)
    selective_step(q, k, v, scale=0.2, evicts=[1, 1], **state)
    assert launches == ["selective"] * 3


def test_one_graph_serves_other_arrays_of_stick_breaking(launches):
    for seed in range(4):
        q, k, v, *_ = arrays(seed, 33)
        for current, begins in ((True, None), (False, mx.array([seed, 5]))):
            options = {"attend_current": current, "begins": begins}
            ours = stick_breaking_attention(q, k, v, scale=0.1, **options)
            zeros = mx.zeros((2,), mx.int32)
            given = zeros if begins is None else begins.astype(mx.int32)
            theirs = stick_definition(q, k, v, 0.1, current, given)
            for one, other in zip(ours, theirs, strict=True):
                assert mx.allclose(one, other, atol=1e-6)
    assert launches == ["stick-breaking"] * 2


@pytest.mark.parametrize("first", [True, False])
def test_derivatives_before_and_after_a_graph_is_kept(launches, monkeypatch, first):
    q, k, v, F, own, positions = arrays(first, 33)
    state = {"query_positions": own, "key_positions": positions}

    def loss(q, k, v, F):
        out, after, _ = selective_step(q, k, v, scale=0.1, F=F, evicts=[1, 1], **state)
        stick, remainder = stick_breaking_attention(q, k, v, scale=0.1)
        return (out * stick).sum() + (after**2).sum() + remainder.sum()

    if first:
        loss(q, k, v, F)
    ours = mx.grad(loss, (0, 1, 2, 3))(q, k, v, F)
    monkeypatch.setattr(choice, "find_backend", lambda: Backend(None, "for comparison"))
    for one, other in zip(ours, mx.grad(loss, (0, 1, 2, 3))(q, k, v, F), strict=True):
        assert mx.allclose(one, other, atol=1e-5)


# The same over prompts ----------------------------------------------------------------------------


@pytest.fixture
def prompt_launches(monkeypatch):
    built = []

    def selective(q, k, v, F, positions, scale, backend, blocks, remaining, chunk):
        built.append("selective")
        state = {"query_positions": positions[0], "key_positions": positions[1]}
        state |= {"remaining": remaining, "documents": None, "block_size": 4}
        return plain_selective(q, k, v, F, scale=scale, **state)

    def stick(settings, shape, keys_shape):
        def launch(q, k, v, begins):
            built.append("stick-breaking")
            return stick_definition(q, k, v, settings[2], settings[3], begins[: len(q)])

        return launch

    monkeypatch.setattr(choice, "find_backend", lambda: Backend("metal"))
    monkeypatch.setattr(selective_prompt, "_launch", selective)
    monkeypatch.setattr(stick_prompt, "_prepare", stick)
    return built


def prompt(seed, T=7, N=12):
    keys = mx.random.split(mx.random.key(seed), 3)
    shapes = [(2, 4, T, 64), (2, 2, N, 64), (2, 2, N, 64)]
    return [mx.random.normal(s, key=key) for s, key in zip(shapes, keys, strict=True)]


def attend_prompt(q, k, v, scale=0.1):
    out, F, needed = selective_attention(
        q, k, v, scale=scale, return_F=True, return_remaining=True, key_positions=mx.arange(12)
    )
    return [out, F, needed, *stick_breaking_attention(q, k, v, scale=scale)]


def test_one_graph_serves_other_prompts(prompt_launches, monkeypatch):
    ours = [attend_prompt(*prompt(seed)) for seed in range(3)]
    assert prompt_launches == ["selective", "stick-breaking"]
    attend_prompt(*prompt(0, T=6))
    attend_prompt(*prompt(0), scale=0.2)
    assert prompt_launches == ["selective", "stick-breaking"] * 3
    monkeypatch.setattr(choice, "find_backend", lambda: Backend(None, "for comparison"))
    for seed, found in enumerate(ours):
        for one, other in zip(found, attend_prompt(*prompt(seed)), strict=True):
            assert mx.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_a_prompts_derivatives_before_and_after(prompt_launches, monkeypatch, first):
    arrays = prompt(5)

    def loss(*arrays):
        return sum((one * mx.cos(one)).sum() for one in attend_prompt(*arrays))

    if first:
        mx.eval(loss(*arrays))
    ours = mx.grad(loss, (0, 1, 2))(*arrays)
    assert prompt_launches
    monkeypatch.setattr(choice, "find_backend", lambda: Backend(None, "for comparison"))
    for one, other in zip(ours, mx.grad(loss, (0, 1, 2))(*arrays), strict=True):
        assert mx.allclose(one, other, atol=1e-4)
