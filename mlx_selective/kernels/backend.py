"""Where kernels run: Metal, CUDA or nowhere, and the one setting for it."""

import os
from typing import NamedTuple

import mlx.core as mx

from ..errors import UserError
from .hooks import current_launcher

#: The environment variable that says where kernels run, for measurements and when in doubt.
SETTING = "MLX_SELECTIVE_KERNELS"
#: ``auto``: where MLX computes, if it can; ``off``: nowhere, all runs in plain MLX.
VALUES = ("auto", "off", "metal", "cuda")


class Backend(NamedTuple):
    """Where kernels run: ``name`` is "metal", "cuda" or None; ``reason`` says why it is None."""

    name: str | None
    reason: str = ""


# made once: every call of a kernel asks
_METAL, _CUDA = Backend("metal"), Backend("cuda")
_ON_CPU = Backend(None, "MLX computes on the CPU")
_NEITHER = Backend(None, "MLX has neither Metal nor CUDA here")


def find_backend() -> Backend:
    """The backend that kernels run on now: it follows the setting and MLX's default device.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS has another value, or names a backend that MLX does
            not have here or does not compute on.
    """
    wanted = os.environ.get(SETTING) or "auto"
    if wanted not in VALUES:
        raise UserError(f"{SETTING} must be one of {', '.join(VALUES)}, got {wanted!r}.")
    if wanted == "off":
        return Backend(None, f"{SETTING} is off")
    here = _available()
    if wanted not in ("auto", here.name):
        raise UserError(f"{SETTING} is {wanted}, but {here.reason or f'MLX has {here.name} here'}.")
    return here


def _available() -> Backend:
    if current_launcher() is not None:
        return _METAL
    if mx.default_device() != mx.gpu:
        return _ON_CPU
    if mx.metal.is_available():
        return _METAL
    return _CUDA if mx.cuda.is_available() else _NEITHER
