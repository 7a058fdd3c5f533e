"""Where the kernels' tests run: on this machine's own GPU, or as Metal text on the processor."""

import os
from contextlib import contextmanager
from unittest.mock import patch

import metal_host
import mlx.core as mx
import pytest

from mlx_selective.doctor.kernels import REMAINDER_FLOOR
from mlx_selective.kernels import find_backend, launched_by
from mlx_selective.kernels.backend import SETTING
from mlx_selective.kernels.splits import share_keys

ON_GPU = find_backend().name is not None
#: the backend that records name
BACKEND = find_backend().name or "metal"

if not ON_GPU:
    pytest.importorskip("ziglang")


@contextmanager
def launching():
    """Kernels run, wherever that is."""
    if ON_GPU:
        yield
    else:
        with launched_by(metal_host.execute):
            yield


@contextmanager
def without_kernels():
    """Plain MLX, on a GPU too."""
    with patch.dict(os.environ, {SETTING: "off"}):
        yield


@contextmanager
def graphs_kept():
    """With mx.compile, as everybody but these tests runs."""
    mx.enable_compile()
    try:
        yield
    finally:
        mx.disable_compile()


def ask_ahead(module, monkeypatch, like: str) -> None:
    """One query's kernel asks for keys ahead, as on CUDA, with the splits of a backend."""
    monkeypatch.setattr(module, "ahead", lambda backend, dtype: True)
    monkeypatch.setattr(module, "share_keys", lambda *sizes: share_keys(*sizes[:-1], like))


#: for tests that ask the processor's host what a kernel read, or use Metal's block sizes
host_only = pytest.mark.skipif(ON_GPU, reason="kernels run on the GPU here, where nobody counts")
#: relative errors that are none yet; on CUDA weights are rounded to the operands' dtype too
_ROUNDED = BACKEND == "cuda"
FLOORS = {
    mx.float32: 2e-7,
    mx.float16: 2e-4 if _ROUNDED else 1e-4,
    mx.bfloat16: 1.6e-3 if _ROUNDED else 1e-3,
}
#: the same of a product of hundreds of factors: a GPU knows their exponentials to two ulp, and
#: CUDA's matrix unit truncates the logits' sums
FACTORS = REMAINDER_FLOOR if ON_GPU else 2e-7
