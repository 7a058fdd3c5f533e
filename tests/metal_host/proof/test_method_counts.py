"""The work of the methods' kernels beside MLX's causal steel_attention on the same shape."""

import mlx.core as mx
import pytest

from .compare_methods import METHODS, both, square

#: heads that share one F at least, by heads
SHARED = {8: 4, 32: 8}


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", SHARED)
@pytest.mark.parametrize("method", METHODS)
def test_counts(method, heads, size):
    theirs, ours = both(method, square(mx.float16, heads, 128, size))
    shared = 1 / (2 * heads) + 1 / (2 * SHARED[heads]) if method == "selective" else 0
    most = 1 + shared + 0.1
    assert ours["multiply-accumulates"] <= most * theirs["multiply-accumulates"]
    assert ours["device bytes"] <= 2 * theirs["device bytes"]
    assert ours["threadgroup memory"] <= 32 * 1024
