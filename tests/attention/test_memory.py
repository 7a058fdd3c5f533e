"""Peak memory stays within what the docstrings say: no N x N array per head."""

import mlx.core as mx
import pytest

from mlx_selective import selective_attention, ssa_attention, stick_breaking_attention

B, H, HKV, N, D, BLOCK = 1, 8, 4, 4096, 16, 64
ALL_LOGITS = B * H * N * N * 4
#: A GPU frees a buffer only when its queue has passed it: the docstrings allow it four times.
LATE = 1 if mx.default_device() == mx.cpu else 4
BLOCK_LOGITS = LATE * B * H * BLOCK * N * 4
#: q, k and v in float32, twice (also their gradients), the output, F at the block starts
ARRAYS = 2 * (H + 2 * HKV) * B * N * D * 4 + 2 * B * H * N * D * 4 + B * N * N // BLOCK * 4


def peak(function, *arguments) -> int:
    """Bytes allocated at most beyond the arguments."""
    mx.eval(*arguments)
    mx.clear_cache()
    start = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arguments))
    return mx.get_peak_memory() - start


@pytest.fixture
def qkv():
    mx.random.seed(0)
    return [mx.random.normal((B, heads, N, D)) for heads in (H, HKV, HKV)]


#: name -> function, and the block logits that its docstring states, forward and backward
FUNCTIONS = {
    "selective": (
        lambda q, k, v: selective_attention(q, k, v, scale=0.25, block_size=BLOCK),
        6,
        21,
    ),
    "stick_breaking": (
        lambda q, k, v: stick_breaking_attention(q, k, v, scale=0.25, block_size=BLOCK)[0],
        11,
        28,
    ),
    "ssa": (
        lambda q, k, v: ssa_attention(q, k, v, None, None, scale=0.25, block_size=BLOCK),
        4,
        None,
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward(name, qkv):
    function, stated, _ = FUNCTIONS[name]
    used = peak(function, *qkv)
    assert used < stated * BLOCK_LOGITS + ARRAYS
    assert used < LATE * ALL_LOGITS / 4


@pytest.mark.parametrize("name", ["selective", "stick_breaking"])
def test_backward(name, qkv):
    function, _, stated = FUNCTIONS[name]
    used = peak(mx.grad(lambda *qkv: function(*qkv).sum(), argnums=(0, 1, 2)), *qkv)
    assert used < stated * BLOCK_LOGITS + ARRAYS
    assert used < LATE * ALL_LOGITS / 2
