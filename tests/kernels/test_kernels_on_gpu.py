"""The kernels on this machine's own GPU, Metal or CUDA, on odd shapes; skipped without one."""

import mlx.core as mx
import numpy as np
import pytest
from methods import error, float64

from mlx_selective.doctor.definitions import attend, softmax
from mlx_selective.doctor.kernels import FLOORS
from mlx_selective.kernels import find_backend, outputs_start_as, record, ssa
from mlx_selective.kernels.causal_attention import HEAD_SIZES, _prepare, causal_attention
from mlx_selective.kernels.tile_words import NAMES, plain_tile_words, tile_words, true_tile_words

pytestmark = pytest.mark.skipif(
    find_backend().name is None, reason=f"no kernels run here: {find_backend().reason}"
)
DTYPES = [mx.float32, mx.float16, mx.bfloat16]
#: (B, H, Hkv, T, N)
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 4, 2, 7, 7),
    (1, 8, 1, 33, 127),
    (1, 2, 2, 127, 127),
    (1, 4, 2, 300, 1000),
]


@pytest.fixture(autouse=True)
def poisoned():
    with outputs_start_as(float("nan")), record() as ran:
        yield
    assert {one.backend for one in ran} == {find_backend().name}


def normal(rng, shape, dtype):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", HEAD_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_causal_attention(shape, size, dtype):
    B, H, Hkv, T, N = shape
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (B, h, n, size), dtype) for h, n in ((H, T), (Hkv, N), (Hkv, N)))
    truth = attend(softmax, *map(float64, (q, k, v)), size**-0.5)
    out = causal_attention(q, k, v, scale=size**-0.5)
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=size**-0.5, mask="causal")
    assert error(out, truth) <= 2 * error(plain, truth) + FLOORS[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("rise", [-0.2, 0.05, 0.085, 0.2, 3])
def test_logits_that_rise_from_block_to_block(rise, size, dtype):
    """By less than the running softmax lets pass, about it and by more, in blocks of 32 to 96."""
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (1, 2, 300, size), dtype) for _ in range(3))
    q, k = q.at[..., 0].multiply(0), k.at[..., 0].multiply(0)
    q = q.at[..., 0].add(4)
    k = k.at[..., 0].add((mx.arange(300) * rise / 2).astype(dtype))
    truth = attend(softmax, *map(float64, (q, k, v)), 0.5)
    plain = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
    out = causal_attention(q, k, v, scale=0.5)
    assert error(out, truth) <= 2 * error(plain, truth) + FLOORS[dtype]


@pytest.mark.parametrize("wide", [1, 3, 6])
def test_heads_that_are_worked_apart(wide, monkeypatch):
    monkeypatch.setattr("mlx_selective.kernels.blocks.CACHE", wide * 200 * 64 * 4)
    _prepare.cache_clear()
    rng = np.random.default_rng(0)
    q, k, v = (normal(rng, (3, heads, 200, 64), mx.float32) for heads in (4, 2, 2))
    truth = attend(softmax, *map(float64, (q, k, v)), 0.125)
    assert error(causal_attention(q, k, v, scale=0.125), truth) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_word_of_the_tiles(dtype):
    rng = np.random.default_rng(0)
    arguments = [normal(rng, (32, 64), dtype) for _ in range(3)]
    rows = zip(
        NAMES,
        tile_words(*arguments),
        plain_tile_words(*arguments),
        true_tile_words(*map(float64, arguments)),
        strict=True,
    )
    for name, out, plain, truth in rows:
        assert error(out, truth) <= 2 * error(plain, truth) + FLOORS[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 8, 64), (2, 3, 11, 80), (1, 2, 127, 96), (2, 5, 33, 128)], ids=str
)
def test_temperatures_of_any_strides(shape, dtype):
    B, H, T, D = shape
    rng = np.random.default_rng(0)
    tau = mx.array(rng.uniform(0.5, 2, (B, H, T, 1)).astype(np.float32))
    for x in (
        normal(rng, shape, dtype),
        normal(rng, (B, T, H, D), dtype).swapaxes(1, 2),
        normal(rng, (B, H, 2 * T, D + 3), dtype)[:, :, ::2, 3:],
        normal(rng, (B, H, D, T), dtype).swapaxes(2, 3),
    ):
        out = ssa.ssa_temperature(x, tau, lambda x, tau: x * tau, smallest=0)
        assert mx.array_equal(out, (x.astype(mx.float32) * tau).astype(dtype))
