"""Shared set-up: a fast BLAS where there is one, the reference checkpoints, converted models."""

import ctypes
import ctypes.util
import os
import signal
import sys
from pathlib import Path

# pytest-xdist's workers share the cores: one thread each.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# mlx's Linux wheel links reference BLAS; an OpenBLAS loaded first takes its place (30x faster).
if sys.platform == "linux" and (openblas := ctypes.util.find_library("openblas")):
    ctypes.CDLL(openblas, mode=ctypes.RTLD_GLOBAL)
# Compiling small graphs with g++ costs more than it saves in tests.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
os.environ.setdefault("MLX_ENABLE_TF32", "0")

import pytest  # noqa: E402

# A shell starts what it puts in the background deaf to Ctrl-C, and the commands that the tests
# start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT.parent / "shared" / "checkpoints"
#: reference checkpoint -> --attention, where its config.json does not tell
REFERENCE = {
    "llama-selective": "selective",
    "llama-softmax": "softmax",
    "dolomite-stickbreaking": None,
    "neox-ssa": None,
}


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """Folder of the reference checkpoints, read in place."""
    if not CHECKPOINTS.is_dir():
        pytest.skip("the reference checkpoints (../shared/checkpoints) are not on this machine")
    return CHECKPOINTS


@pytest.fixture(scope="session")
def converted(checkpoints, tmp_path_factory):
    """Gives the float32 conversion of a reference checkpoint by name, made once."""
    from mlx_selective.convert import convert

    folder = tmp_path_factory.mktemp("converted")

    def get(name: str) -> Path:
        target = folder / name
        if not (checkpoints / name).is_dir():
            pytest.skip(f"the reference checkpoint {name} is not on this machine")
        if not target.exists():
            convert(str(checkpoints / name), target, attention=REFERENCE[name], dtype="float32")
        return target

    return get
