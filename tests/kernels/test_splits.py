"""How a cache's keys are shared out: all of them, once, within what a GPU holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_selective.kernels.splits import ALONE, MOST_SPLITS, SPLIT, share_keys

backends = pytest.mark.parametrize("backend", ["metal", "cuda"])


@backends
@given(
    group=st.integers(1, 12),
    key_heads=st.integers(1, 64),
    rows=st.integers(1, 64),
    keys=st.integers(1, 300_000),
    head_size=st.sampled_from([64, 80, 96, 128]),
)
def test_every_key_has_one_place(backend, group, key_heads, rows, keys, head_size):
    found = share_keys(group, rows * group * key_heads, keys, head_size, backend)
    assert (found.count - 1) * found.keys < keys <= found.count * found.keys
    assert group % found.heads == 0 and found.count <= MOST_SPLITS
    # a simdgroup goes through whole steps of 32 keys
    assert found.keys % (32 * found.simdgroups) == 0
    if found.count == 1:
        return
    assert keys > ALONE[backend] and found.keys >= SPLIT and found.simdgroups == 8


@backends
def test_a_long_cache_of_one_row_keeps_a_gpu_busy(backend):
    for head_size in (64, 128):
        for group in (1, 4):
            found = share_keys(group, 32, 32768, head_size, backend)
            assert found.count * 32 // found.heads >= 128


def test_threads_stay_within_cudas_registers():
    """65536 a core: 128 a thread of 12 simdgroups with 64 elements, at most 255 of 8 beyond."""
    for head_size in (64, 80, 96, 128):
        for keys in (1, 600, 4096, 5000):
            found = share_keys(4, 32, keys, head_size, "cuda")
            registers = 128 if found.heads * head_size <= 64 else 255
            assert found.simdgroups * 32 * registers <= 65536


@pytest.mark.parametrize("backend, keys", ALONE.items())
def test_one_launch_up_to_a_length(backend, keys):
    assert share_keys(1, 32, keys, 64, backend).count == 1
    assert share_keys(1, 32, keys + 1, 64, backend).count > 1
