"""``mlx-selective doctor``: what a bug report needs, and whether the mathematics is right."""

import argparse
import importlib.metadata
import platform

import mlx.core as mx

from .. import __version__
from ..kernels import find_backend
from .checks import TOLERANCE, check_methods
from .kernels import check_kernels

_PACKAGES = ("mlx", "mlx-lm", "numpy", "transformers", "sentencepiece", "safetensors")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of ``doctor``."""
    parser.add_argument(
        "--kernels",
        action="store_true",
        help="compile, check and time every kernel on this machine, instead of the methods",
    )


def run(args: argparse.Namespace) -> int:
    """Prints backend, versions and the self-check; returns 1 if the check fails."""
    kernels = find_backend()
    print(f"mlx-selective  {__version__}")
    print(f"python         {platform.python_version()} on {platform.platform()}")
    print(f"backend        {backend()}")
    print(f"chip           {chip()}")
    print(f"kernels        {kernels.name or f'none: {kernels.reason}'}")
    for package in _PACKAGES:
        print(f"{package:<14} {importlib.metadata.version(package)}")
    print()
    return 0 if (check_kernels() if args.kernels else _check_methods()) else 1


def _check_methods() -> bool:
    """Prints a line for each method; tells whether all are right."""
    print(f"{'method':<15} {'RMS-relative error':>18}   against NumPy float64")
    errors = check_methods()
    for name, error in errors.items():
        print(f"{name:<15} {error:>18.1e}   {'ok' if error <= TOLERANCE else 'FAILED'}")
    # written so that an error that is not a number fails too
    good = all(error <= TOLERANCE for error in errors.values())
    if not good and mx.default_device() == mx.gpu:
        print("\nMLX rounds float32 products to TF32 on some GPUs: try MLX_ENABLE_TF32=0.")
    return good


def backend() -> str:
    """The device that MLX computes on."""
    if mx.default_device() == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def chip() -> str:
    """The device's name, and what else MLX tells of it: architecture and memory."""
    info = mx.device_info() if hasattr(mx, "device_info") else mx.metal.device_info()
    told = [str(info[key]) for key in ("device_name", "architecture") if info.get(key)]
    memory = info.get("memory_size") or info.get("total_memory")
    if memory:
        told.append(f"{int(memory) / 2**30:.0f} GB")
    return ", ".join(told) or "unknown"
