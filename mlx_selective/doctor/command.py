"""``mlx-selective doctor``: what a bug report needs, and whether the mathematics is right."""

import argparse
import importlib.metadata
import platform

import mlx.core as mx

from .. import __version__
from .checks import TOLERANCE, check_methods

_PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "sentencepiece", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(args: argparse.Namespace) -> int:
    """Prints backend, versions and the self-check; returns 1 if the check fails."""
    print(f"mlx-selective  {__version__}")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    print(f"backend        {backend()}")
    for package in _PACKAGES:
        print(f"{package:<14} {importlib.metadata.version(package)}")
    print()
    print(f"{'method':<15} {'RMS-relative error':>18}   against NumPy float64")
    errors = check_methods()
    for name, error in errors.items():
        print(f"{name:<15} {error:>18.1e}   {'ok' if error <= TOLERANCE else 'FAILED'}")
    # written so that an error that is not a number fails too
    good = all(error <= TOLERANCE for error in errors.values())
    if not good and mx.default_device() == mx.gpu:
        print("\nMLX rounds float32 products to TF32 on some GPUs: try MLX_ENABLE_TF32=0.")
    return 0 if good else 1


def backend() -> str:
    """The device that MLX computes on."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"
