"""Selective attention's kernels as Metal text on the processor, against NumPy float64."""

import mlx.core as mx
import numpy as np
import oracle
import pytest
from covering import covering, every
from methods import error, float64
from place import BACKEND, FLOORS, host_only, launching

from mlx_selective import selective_attention
from mlx_selective.attention.blocks import QUERY_BLOCK
from mlx_selective.attention.selective.definition import plain_selective
from mlx_selective.kernels import outputs_start_as, record
from mlx_selective.kernels import selective as module
from mlx_selective.kernels.blocks import Blocks
from mlx_selective.kernels.selective import selective
from mlx_selective.kernels.selective_chunks import share_queries

SHAPES = {
    "dtype": list(FLOORS),
    "D": [64, 80, 96, 128],
    "T": [2, 7, 31, 33, 127],
    "earlier": [0, 1, 30, 77],  # keys before the first query
    "heads": [(1, 1), (4, 1), (6, 2)],  # H, Hkv
    "B": [1, 2],
    "pad": [0, 1, 5],  # tokens of padding before the last row's first
    "chunk": [None, 1, 2],  # in blocks of queries
}


def definition(q, k, v, F, scale, query_positions, key_positions):
    """Output, F after the queries, and remaining memory; everything NumPy float64."""
    H = q.shape[1]
    k, v = oracle.repeat_heads(k, H), oracle.repeat_heads(v, H)
    z = scale * np.einsum("bhid,bhjd->bhij", q, k)
    key, own = key_positions[:, None], query_positions[:, :, None]
    visible = (key >= 0) & (key <= own)
    S = np.where(visible & (key > 0) & (key < own), np.maximum(z[:, 0], 0), 0)
    rows = F[:, None] + np.pad(np.cumsum(S, 1), ((0, 0), (1, 0), (0, 0)))[:, :-1]
    z = np.where(visible[:, None], z - rows[:, None], -np.inf)
    most = z.max(-1, keepdims=True)
    e = np.exp(z - np.where(np.isfinite(most), most, 0))
    total = e.sum(-1, keepdims=True)
    out = (e / np.where(total == 0, 1, total)) @ v
    needed = np.where(visible, 1 - np.minimum(rows, 1), 0).sum(-1)
    return out, F + S.sum(1), needed


def problem(dtype=mx.float32, D=64, T=7, earlier=0, heads=(2, 1), B=1, pad=0, seed=0):
    """q, k, v, F and the positions of queries and keys, as a cache would hand them over."""
    N, keys = T + earlier, mx.random.split(mx.random.key(seed), 4)
    shapes = [(B, heads[0], T, D), (B, heads[1], N, D), (B, heads[1], N, D)]
    q, k, v = (
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key in zip(shapes, keys, strict=False)
    )
    key_positions = np.tile(np.arange(N), (B, 1))
    key_positions[-1] -= min(pad, N - 1)
    F = mx.random.uniform(0, 3, (B, N), key=keys[3])
    F = mx.where((mx.arange(N) < earlier) & (mx.array(key_positions) > 0), F, 0)
    positions = mx.array(np.maximum(key_positions, -1).astype(np.int32))
    return q, k, v, F, positions[:, earlier:], positions


def by_kernel(q, k, v, F, query_positions, key_positions, scale, chunk=None):
    """Output, F and remaining memory; they begin as NaN, so that what is not written shows."""
    if chunk is not None:
        chunk *= module.BLOCKS[BACKEND, q.dtype.size][q.shape[3]].queries
    positions = {"query_positions": query_positions, "key_positions": key_positions}
    with launching(), outputs_start_as(float("nan")):
        results = selective(
            q, k, v, F, scale=scale, definition=None, remaining=True, chunk=chunk, **positions
        )
        mx.eval(results)
    return results


def plain(q, k, v, F, query_positions, key_positions, scale):
    return plain_selective(
        *(q, k, v, F),
        scale=scale,
        query_positions=query_positions,
        key_positions=key_positions,
        remaining=True,
        documents=None,
        block_size=QUERY_BLOCK,
    )


def check(*problems, chunk=None):
    """Over all problems, at most twice the error of plain MLX in that dtype, and a floor."""
    found = []
    for arrays, scale in problems:
        results = by_kernel(*arrays, scale, chunk)
        assert [one.dtype for one in results] == [arrays[0].dtype, mx.float32, mx.float32]
        truth = definition(*map(float64, arrays[:4]), scale, *(np.array(p) for p in arrays[4:]))
        found.append((results, plain(*arrays, scale), truth))
    for one, floor in enumerate((FLOORS[problems[0][0][0].dtype], 2e-7, 2e-7)):
        ours, theirs, truths = (
            np.concatenate([np.ravel(as_float(f[side][one])) for f in found]) for side in range(3)
        )
        assert error(ours, truths) <= 2 * error(theirs, truths) + floor


def as_float(array):
    return float64(array) if isinstance(array, mx.array) else array


def check_shape(seed, D, B, heads, T, chunk, **case):
    """Few rows are drawn several times: the error of a few values of F is a matter of luck."""
    draws = -(-96 // (B * T))
    case |= {"D": D, "B": B, "heads": heads, "T": T}
    check(*((problem(**case, seed=100 * seed + i), D**-0.5) for i in range(draws)), chunk=chunk)


def names(case):
    return "-".join(str(value).replace("mlx.core.", "") for value in case.values())


CASES = covering(SHAPES)


def test_the_definition_is_the_oracle():
    arrays = problem(T=20, heads=(4, 2), B=2)
    q, k, v, F = map(float64, arrays[:4])
    out, F_after, needed = definition(q, k, v, F, 0.3, *(np.array(p) for p in arrays[4:]))
    truth, rows = oracle.selective(q, k, v, 0.3)
    assert np.allclose(out, truth)
    assert np.allclose(needed, np.tril(1 - np.minimum(rows, 1)).sum(-1))


@pytest.mark.parametrize("seed, case", list(enumerate(CASES)), ids=map(names, CASES))
def test_shapes(seed, case):
    check_shape(seed, **case)


@pytest.mark.slow
@pytest.mark.parametrize("heads", SHAPES["heads"], ids=str)
@pytest.mark.parametrize("D", SHAPES["D"])
@pytest.mark.parametrize("dtype", SHAPES["dtype"], ids=str)
def test_every_shape(dtype, D, heads):
    cases = every(SHAPES | {"dtype": [dtype], "D": [D], "heads": [heads]})
    for seed, case in enumerate(cases):
        check_shape(seed, **case)


def test_a_thousand_queries():
    check((problem(T=1000, heads=(2, 1)), 0.125), chunk=3)


@pytest.mark.parametrize("dtype", FLOORS, ids=str)
def test_all_is_forgotten_but_the_first_and_the_own(dtype):
    """Head 0 selects everything strongly: F passes what float16 counts, and nothing is NaN."""
    q, k, v, F, *positions = problem(dtype, T=70, heads=(2, 1))
    q = mx.concatenate([mx.abs(q[..., :1]) * 100 + 100, 0 * q[..., 1:]], -1).astype(dtype)
    k = mx.concatenate([mx.abs(k[..., :1]) * 20 + 20, 0 * k[..., 1:]], -1).astype(dtype)
    check(((q, k, v, F, *positions), 1.0))


@host_only
@pytest.mark.parametrize(
    "dtype, keys",
    [(mx.float32, 16), (mx.float32, 48), (mx.bfloat16, 48), (mx.bfloat16, 96)],
    ids=str,
)
def test_blocks_that_do_not_fit_the_masks(dtype, keys, monkeypatch):
    """A block of keys reaches into keys that its queries do not see, and into the next strip."""
    monkeypatch.setitem(module.BLOCKS, ("metal", dtype.size), {64: Blocks(16, keys, 8, 1)})
    for T, earlier in ((100, 0), (70, 45), (33, 30)):
        check((problem(dtype, T=T, earlier=earlier, heads=(2, 1)), 0.125), chunk=1)


def test_keys_in_any_order_before_the_queries():
    q, k, v, F, own, positions = problem(T=9, earlier=40, heads=(2, 2), B=2)
    order = mx.array(np.r_[np.random.default_rng(0).permutation(40), np.arange(40, 49)])
    moved = [k[:, :, order], v[:, :, order], F[:, order], own, positions[:, order]]
    here, there = by_kernel(q, *moved, 0.125), by_kernel(q, k, v, F, own, positions, 0.125)
    assert error(here[0], float64(there[0])) < 1e-6
    assert error(here[1], float64(there[1])[:, np.array(order)]) < 1e-6
    check(((q, *moved), 0.125))


def test_empty_slots_among_the_keys():
    """Rows that keep fewer keys have empty slots, whose content is anything finite."""
    q, k, v, F, own, positions = problem(T=9, earlier=40, heads=(2, 2), B=2)
    empty = mx.zeros((2, 49), mx.bool_)
    empty[1, 20:40] = True
    positions = mx.where(empty, -1, positions)
    check(((q, k, mx.where(empty[:, None, :, None], 1e4, v), F, own, positions), 0.125))


def test_gradients_are_those_of_the_definition(monkeypatch):
    q, k, v, *_ = problem(T=12, heads=(2, 1))

    def loss(q, k, v):
        out, F, needed = selective_attention(
            q, k, v, scale=0.4, return_F=True, return_remaining=True
        )
        return (out**2).sum() + (F * mx.arange(12)).sum() + needed.max()

    with launching(), record() as ran:
        ours = mx.grad(loss, (0, 1, 2))(q, k, v)
        mx.eval(ours)
    assert BACKEND in [one.backend for one in ran]
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    for one, other in zip(ours, mx.grad(loss, (0, 1, 2))(q, k, v), strict=True):
        assert error(one, float64(other)) < 1e-5


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"D": 48}, "head size 48"),
        ({"T": 1, "earlier": 5}, "one query"),
        ({"dtype": mx.float16, "scale": 1e-3}, "scale 0.001"),
        ({"scale": -1.0}, "scale -1.0"),
    ],
)
def test_what_plain_mlx_computes(change, reason):
    scale = change.pop("scale", 0.125)
    arrays = problem(**change)
    q, k, v, F, *positions = arrays
    with launching(), record() as ran:
        out = selective_attention(
            *(q, k, v), F=F, scale=scale, query_positions=positions[0], key_positions=positions[1]
        )
    assert [(one.backend, one.reason) for one in ran] == [(None, reason)]
    truth = definition(*map(float64, arrays[:4]), scale, *(np.array(p) for p in arrays[4:]))
    assert error(out, truth[0]) < 2e-3


def test_more_f_than_32_bits_count():
    """Nothing is evaluated: at 131072 keys, F at the start of each block of 32 is 2^29 values."""
    for B, reason in (
        (3, ""),
        (4, f"{2**31} values of F at block starts, more than 32 bits count"),
    ):
        q = mx.zeros((B, 1, 131072, 64), mx.float16)
        assert module._why_plain(q, q, q, 0.125) == reason


@pytest.mark.parametrize("T, earlier", [(4096, 0), (16384, 0), (2048, 14336), (16385, 77)])
@pytest.mark.parametrize("B, H, D", [(1, 32, 64), (1, 8, 128), (2, 32, 64)])
def test_chunks_take_a_share_of_the_memory(B, H, D, T, earlier):
    blocks, N = module.BLOCKS["cuda", 2][D], T + earlier
    nbytes = 2 * B * H * D * (T + N)
    room, chunks = share_queries(B, H, T, N, nbytes, 2, blocks)
    assert [one.start for one in chunks] == np.cumsum([0, *(c.rows for c in chunks)])[:-1].tolist()
    assert sum(one.rows for one in chunks) == T
    assert all(one.start % blocks.queries == 0 for one in chunks)
    assert all(N - T + one.start + one.rows <= one.width <= N + blocks.keys for one in chunks)
    assert max(B * one.rows * one.width for one in chunks) == room
    # or as much as 256 threadgroups of the last queries need
    last = B * -(-256 // (B * H)) * blocks.queries * (N + blocks.keys)
    assert room <= max(nbytes / (2 if len(chunks) == 1 else 8), last)


def test_chunks_are_about_equally_large():
    blocks = module.BLOCKS["cuda", 2][64]
    room, chunks = share_queries(1, 32, 16384, 16384, 2 * 32 * 64 * 2 * 16384, 2, blocks)
    assert len(chunks) == 10
    assert min(one.rows * one.width for one in chunks) > 0.75 * room
