"""Peak memory of 8192 tokens stays within what the docstrings say: no N x N array per head."""

import mlx.core as mx
import pytest
from layer import attend

from mlx_selective import (
    PrunedKVCache,
    selective_attention,
    ssa_attention,
    stick_breaking_attention,
)
from mlx_selective.attention.blocks import QUERY_BLOCK

B, H, HKV, N, D, BLOCK = 1, 4, 2, 8192, 16, 64
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
        lambda q, k, v, **o: selective_attention(q, k, v, scale=0.25, block_size=BLOCK, **o),
        7,
        25,
    ),
    "stick_breaking": (
        lambda q, k, v, **o: stick_breaking_attention(q, k, v, scale=0.25, block_size=BLOCK, **o)[
            0
        ],
        12,
        32,
    ),
    "ssa": (
        lambda q, k, v, **o: ssa_attention(q, k, v, None, None, scale=0.25, block_size=BLOCK, **o),
        5,
        None,
    ),
}
PACKED = mx.arange(N) // 1000


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one document"),
        pytest.param({"segment_ids": PACKED}, id="packed", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward(name, options, qkv):
    function, stated, _ = FUNCTIONS[name]
    used = peak(lambda *qkv: function(*qkv, **options), *qkv)
    assert used < stated * BLOCK_LOGITS + ARRAYS
    assert used < LATE * ALL_LOGITS / 4


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) for name in ("selective", "stick_breaking")]
)
def test_backward(name, qkv):
    function, _, stated = FUNCTIONS[name]
    used = peak(mx.grad(lambda *qkv: function(*qkv).sum(), argnums=(0, 1, 2)), *qkv)
    assert used < stated * BLOCK_LOGITS + ARRAYS
    assert used < LATE * ALL_LOGITS / 2


def test_prompt_through_the_pruned_cache(qkv):
    """8192 tokens in chunks of 512 under a budget: what is kept, and one chunk's logits."""
    q, k, v = qkv
    budget, chunk = 256, 512
    cache = PrunedKVCache(budget)

    def read_prompt():
        for start in range(0, N, chunk):
            mx.eval(attend(cache, *(a[:, :, start : start + chunk] for a in (q, k, v))))
        return cache.keys

    live = budget + chunk
    block_logits = LATE * B * H * QUERY_BLOCK * live * 4
    # keys and values that are live: in the cache, in float32, and while the kept are gathered;
    # the queries and outputs of the chunk
    arrays = 4 * 2 * B * HKV * live * D * 4 + 8 * B * H * chunk * D * 4
    assert peak(read_prompt) < 7 * block_logits + LATE * arrays
    assert cache.size() == budget
