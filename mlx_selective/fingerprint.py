"""Telling models apart, whatever folder or adapter they came from."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten


def fingerprint(model: nn.Module, *, trained: bool = True) -> str:
    """A hash of names, types, shapes and first numbers of a model's parameters.

    Args:
        model: loaded, with its adapter if it has one.
        trained: whether the numbers of trainable parameters count.
    """
    found = hashlib.sha256()
    changing = {} if trained else dict(tree_flatten(model.trainable_parameters()))
    for name, value in sorted(tree_flatten(model.parameters())):
        found.update(f"{name} {value.dtype} {value.shape} ".encode())
        if name not in changing:
            first = mx.flatten(value)[:64]
            whole = mx.issubdtype(first.dtype, mx.integer)
            found.update(np.array(first.astype(mx.uint32 if whole else mx.float32)).tobytes())
    return found.hexdigest()
