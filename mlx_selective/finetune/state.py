"""Everything that training needs to go on as if nothing had been: one file, written whole."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from ..errors import UserError
from ..files import check_safetensors
from ..writing import whole_file
from .objective import UNREPORTED, hold

FILE = "training_state.safetensors"
_WEIGHTS, _OPTIMIZER, _RANDOM = "weights.", "optimizer.", "random"


def save_state(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, iteration: int, settings: dict
) -> None:
    """Writes what is trained, the optimizer, MLX's random state, unreported losses and the place.

    The old file stays until the new one is whole.

    Args:
        folder: of the adapter.
        model: its trainable parameters are saved, and the losses that it holds.
        optimizer: its state, with the step that a schedule counts, is saved.
        iteration: the last one that is done; its batch is the last one that was seen.
        settings: what has to be the same to go on.

    Raises:
        UserError: if it cannot be written.
    """
    arrays = {
        **{_WEIGHTS + name: value for name, value in tree_flatten(model.trainable_parameters())},
        **{_OPTIMIZER + name: value for name, value in tree_flatten(optimizer.state)},
        _RANDOM: mx.random.state[0],
        UNREPORTED: model[UNREPORTED],
    }
    metadata = {"iteration": str(iteration), "settings": json.dumps(settings, sort_keys=True)}
    with whole_file(folder / FILE) as file:
        mx.save_safetensors(str(file), arrays, metadata)


def load_state(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, settings: dict[str, Any]
) -> int:
    """Takes back what :func:`save_state` wrote.

    Returns:
        The last iteration that is done.

    Raises:
        UserError: if there is no such file, it is damaged, or of another training.
    """
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{path}: no such file; --resume goes on where a training was stopped.")
    check_safetensors(path)
    arrays, metadata = mx.load(str(path), return_metadata=True)
    try:
        iteration, before = int(metadata["iteration"]), json.loads(metadata["settings"])
    except (LookupError, ValueError) as error:
        raise UserError(f"{path}: not a training state of mlx-selective ({error}).") from None
    for name, value in settings.items():
        if before.get(name) != value:
            raise UserError(
                f"{path}: was made with {name} {before.get(name)!r}, now it is {value!r}; "
                "give the same to go on, or leave out --resume."
            )
    weights = _part(arrays, _WEIGHTS)
    own = dict(tree_flatten(model.trainable_parameters()))
    if _shapes(weights) != _shapes(own):
        raise UserError(f"{path}: holds other parameters than are trained here.")
    optimizer.init(model.trainable_parameters())
    steps = _part(arrays, _OPTIMIZER)
    whole = _RANDOM in arrays and UNREPORTED in arrays
    if _shapes(steps) != _shapes(dict(tree_flatten(optimizer.state))) or not whole:
        raise UserError(f"{path}: is not whole: a part of the state is missing.")
    model.load_weights(list(weights.items()), strict=False)
    optimizer.state = tree_unflatten(list(steps.items()))
    high, low = arrays[_RANDOM].tolist()
    mx.random.seed(high << 32 | low)  # whose two halves are the state itself
    hold(model, **{UNREPORTED: arrays[UNREPORTED]})
    mx.eval(model.trainable_parameters(), optimizer.state)
    return iteration


def _shapes(arrays: dict[str, mx.array]) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in arrays.items()}


def _part(arrays: dict[str, mx.array], prefix: str) -> dict[str, mx.array]:
    return {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}
