"""Selective attention's kernel for one query, as Metal text on the processor, and its cache."""

import metal_host
import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering, every
from layer import SCALE, kept, run
from methods import error, float64
from place import BACKEND, FLOORS, ask_ahead, host_only, launching
from test_selective_kernel import definition, names

from mlx_selective import PrunedKVCache
from mlx_selective.attention.selective.definition import plain_selective, selective_step
from mlx_selective.kernels import outputs_start_as, record
from mlx_selective.kernels import selective_decode as module

SHAPES = {
    "dtype": list(FLOORS),
    "D": [64, 80, 96, 128],
    "N": [9, 33, 127, 512, 513, 1100],
    "heads": [(1, 1), (4, 1), (6, 2), (3, 3)],
    "B": [1, 2, 5],
    "empty": [0, 3],  # slots of the last row that hold nothing
}


def problem(dtype, D, N, heads, B, empty, seed=0):
    """q, k, v, F and positions of a cache: slots in any order, keys part of a larger array."""
    keys, rng = mx.random.split(mx.random.key(seed), 4), np.random.default_rng(seed)
    shapes = [(B, heads[0], 1, D), (B, heads[1], N + 7, D), (B, heads[1], N + 7, D)]
    q, k, v = (
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip(shapes, keys, strict=False)
    )
    positions = np.stack([rng.permutation(N) for _ in range(B)])
    positions[-1] = np.where(positions[-1] < empty, -1, positions[-1] - empty)
    own = positions.max(1, keepdims=True)
    F = mx.random.uniform(0, 3, (B, N), key=keys[3])
    F = mx.where(mx.array((positions > 0) & (positions < own)), F, 0)
    positions, own = (mx.array(array.astype(np.int32)) for array in (positions, own))
    return q, k[:, :, :N], v[:, :, :N], F, own, positions


def step(q, k, v, F, own, positions, scale, evicts):
    """Output, F and slots by the kernel; they begin as NaN, so that what is not written shows."""
    with launching(), outputs_start_as(float("nan")), record() as ran:
        results = selective_step(
            q,
            k,
            v,
            scale=scale,
            query_positions=own,
            key_positions=positions,
            F=F,
            evicts=evicts,
        )
        mx.eval(results)
    # MLX cannot poison integers: the slots are checked by their values
    assert {one.backend for one in ran} == {BACKEND}
    return results


def slots_of(F, own, positions, evicts):
    """The rule of context pruning, row by row."""
    found = []
    for row, evict in enumerate(evicts):
        stays = (positions[row] <= 0) | (positions[row] == own[row])
        rank = np.where(stays, -1, F[row]) if evict else np.zeros(len(stays))
        best = np.flatnonzero(rank == rank.max())
        found.append(best[positions[row][best].argmin()])
    return found


def check_shape(seed, D, **case):
    arrays = problem(D=D, seed=seed, **case)
    evicts = [1] * case["B"] if not case["empty"] else [1] * (case["B"] - 1) + [0]
    out, F, slots = step(*arrays, D**-0.5, evicts)
    truth = definition(*map(float64, arrays[:4]), D**-0.5, *(np.array(p) for p in arrays[4:]))
    plain = selective_plain(*arrays, D**-0.5)
    assert error(out, truth[0]) <= 2 * error(plain, truth[0]) + FLOORS[case["dtype"]]
    assert error(F, truth[1]) <= 5e-7
    expected = slots_of(np.array(F), *(np.array(p) for p in arrays[4:]), evicts)
    assert slots.shape == (case["B"], 1) and slots[:, 0].tolist() == expected


def selective_plain(q, k, v, F, own, positions, scale):
    settings = {"scale": scale, "remaining": False, "documents": None, "block_size": 1}
    return plain_selective(q, k, v, F, query_positions=own, key_positions=positions, **settings)[0]


CASES = covering(SHAPES)


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_shapes(seed, case):
    check_shape(seed, **case)


AHEAD = covering(SHAPES | {"dtype": [mx.float16, mx.bfloat16], "like": ["metal", "cuda"]})


@host_only
@pytest.mark.parametrize("seed, case", list(enumerate(AHEAD)), ids=map(names, AHEAD))
def test_shapes_with_keys_asked_for_ahead(seed, case, monkeypatch):
    """As on CUDA, and with the splits of either backend: the text is Metal's all the same."""
    ask_ahead(module, monkeypatch, case["like"])
    check_shape(seed, **{name: value for name, value in case.items() if name != "like"})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOORS, ids=str)
@pytest.mark.parametrize("D", SHAPES["D"])
def test_every_shape(D, dtype):
    for seed, case in enumerate(every(SHAPES | {"D": [D], "dtype": [dtype]})):
        check_shape(seed, **case)


@pytest.mark.parametrize("chunks", [[1] * 30, [5, 1, 1, 13, 1, 1, 1, 2, 1, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("budget", [3, 7, 16, None])
def test_evicts_as_the_oracle_does(budget, chunks):
    """The cache, fed through the kernels: what it keeps, its F and the outputs."""
    rng = np.random.default_rng(0)
    q, k, v = (
        mx.array(rng.standard_normal((2, heads, 30, 64)).astype(np.float32) / 2)
        for heads in (4, 2, 2)
    )
    cache = PrunedKVCache(budget)
    with launching(), record() as ran:
        output = run(cache, q, k, v, chunks)
        mx.eval(output, cache.state)
    assert {"selective_decode"} <= {one.kernel for one in ran if one.backend}
    truth = [float64(array) for array in (q, k, v)]
    expected, positions, F = oracle.selective_pruned(*truth, SCALE, budget, chunks)
    assert error(output, expected) < 1e-5
    held, held_F, *_ = kept(cache)
    assert (held == positions).all()
    assert np.allclose(held_F, F, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_oldest():
    """Nothing is selected: of keys that are all at F = 0 the second token leaves."""
    q, k, v, F, own, positions = problem(mx.float32, 64, 600, (2, 2), 2, 0)
    out, after, slots = step(0 * q, k, v, 0 * F, own, positions, 0.125, [1, 1])
    assert mx.array_equal(after, mx.zeros((2, 600)))
    assert mx.take_along_axis(positions, slots, axis=1).tolist() == [[1], [1]]


def test_a_row_of_padding_gets_zeros():
    q, k, v, F, own, positions = problem(mx.float16, 64, 40, (2, 2), 2, 0)
    own = mx.array([[own[0].item()], [-1]])
    out, after, _ = step(q, k, v, F, own, positions, 0.125, [0, 0])
    assert mx.array_equal(out[1], mx.zeros((2, 1, 64)))
    assert mx.array_equal(after[1], F[1])


def test_large_and_rising_logits():
    q, k, v, F, own, positions = problem(mx.float32, 64, 1100, (2, 2), 1, 0)
    for scale in (1e-3, 10.0, 1e3):
        out, *_ = step(q, k, v, F, own, positions, scale, [1])
        arrays = map(float64, (q, k, v, F))
        truth = definition(*arrays, scale, np.array(own), np.array(positions))[0]
        plain = selective_plain(q, k, v, F, own, positions, scale)
        # logits themselves are rounded
        largest = scale * np.abs(float64(q) @ float64(k).swapaxes(2, 3)).max()
        assert error(out, truth) <= 2 * error(plain, truth) + 2e-7 + 6e-8 * largest


@host_only
def test_keys_are_read_where_they_lie():
    """No copy is made of a cache's part; each key and value is read once for a group of heads."""
    q, k, v, F, own, positions = problem(mx.float16, 64, 512, (4, 2), 1, 0)
    mx.eval(q, k, v, F)
    with metal_host.recording() as reports:
        step(q, k, v, F, own, positions, 0.125, [1])
    (report,) = reports
    assert report.device_read["k"] == report.device_read["v"] == 2 * 512 * 64 * 2
    assert report.threadgroup_memory <= 32 * 1024


def test_a_transposed_cache_is_read_element_by_element():
    q, k, v, F, own, positions = problem(mx.float32, 80, 40, (2, 2), 1, 0)
    turned = [mx.contiguous(array.swapaxes(2, 3)).swapaxes(2, 3) for array in (k, v)]
    # rows that do not begin at multiples of sixteen bytes
    odd = [mx.pad(array, [(0, 0)] * 3 + [(1, 2)])[..., 1:-2] for array in (k, v)]
    one = step(q, k, v, F, own, positions, 0.125, [1])
    for keys, values in (turned, odd):
        other = step(q, keys, values, F, own, positions, 0.125, [1])
        assert all(mx.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_gradients_are_those_of_the_definition(monkeypatch):
    q, k, v, F, own, positions = problem(mx.float32, 64, 20, (2, 2), 1, 0)

    def loss(q, k, v, F):
        positions_of = {"query_positions": own, "key_positions": positions}
        out, after, _ = selective_step(q, k, v, scale=0.3, F=F, evicts=[1], **positions_of)
        return (out**2).sum() + (after * mx.arange(20)).sum()

    with launching(), record() as ran:
        ours = mx.grad(loss, (0, 1, 2, 3))(q, k, v, F)
        mx.eval(ours)
    assert {one.backend for one in ran} == {BACKEND}
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    for one, other in zip(ours, mx.grad(loss, (0, 1, 2, 3))(q, k, v, F), strict=True):
        assert error(one, float64(other)) < 1e-5


def test_few_keys_are_for_plain_mlx():
    q, k, v, F, own, positions = problem(mx.float32, 64, 7, (2, 2), 1, 0)
    state = {"F": F, "query_positions": own, "key_positions": positions}
    with launching(), record() as ran:
        selective_step(q, k, v, scale=0.125, evicts=[0], **state)
    assert [(one.backend, one.reason) for one in ran] == [(None, "only 7 keys")]
    assert module.DECODE.name == "selective_decode"
