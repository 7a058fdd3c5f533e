"""The parameters that attention methods add to a model, such as SSA's temperatures."""

import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters


def own_names(model: nn.Module, root: nn.Module | None = None) -> list[str]:
    """Names of the method's own parameters, in order.

    Args:
        model: a model, grafted or not.
        root: a part of it, whose names are given; None for all of it.
    """
    parts = getattr(getattr(model, "attention", None), "own_parameters", ())
    names = (name for name, _ in tree_flatten((root or model).parameters()))
    return [name for name in names if any(part in name for part in parts)]


def unfreeze_own(model: nn.Module, layers: int) -> int:
    """Lets the method's own parameters of the last layers be trained.

    Args:
        model: a grafted model.
        layers: how many layers from the last one on, -1 for all.

    Returns:
        How many numbers those parameters have.
    """
    count = 0
    for layer in model.layers[-max(layers, 0) :]:
        for name in own_names(model, layer):
            *path, leaf = name.split(".")
            module = layer
            for part in path:
                module = module[int(part)] if isinstance(module, list) else module[part]
            module.unfreeze(recurse=False, keys=[leaf])
            count += module[leaf].size
    return count


def share_of_own(model: nn.Module) -> float:
    """The method's own parameters as a share of all that the model has, quantised or not."""
    own = set(own_names(model))
    parameters = tree_flatten(model.parameters())
    return sum(v.size for name, v in parameters if name in own) / get_total_parameters(model)
