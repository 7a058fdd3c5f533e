"""What training lowers: the loss of the words, and what selective layers still need to keep."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.trainer import default_loss

from ..attention.selective.memory_loss import TrainingPass, keys_needed

#: What the model itself holds in training, so that mlx-lm's compiled step takes it in and gives it
#: back: the gain of F, keys that stay, the share of keys that each selective layer needs, and the
#: sum and number of the losses since the last report.
GAIN, KEEP, NEEDED = "selection_gain", "selection_keep", "keys_needed"
UNREPORTED = "unreported_losses"


class Objective:
    """mlx-lm's loss, and ``memory_weight`` times the memory loss where layers are selective.

    Args:
        own: what selective layers follow in training; its :func:`training_pass` has to be open.
        memory_weight: the paper's eps; 0 leaves the memory loss out.
    """

    def __init__(self, own: TrainingPass, memory_weight: float = 0.0):
        self._pass = own
        self._weight = memory_weight

    def __call__(
        self, model: nn.Module, batch: mx.array, lengths: mx.array
    ) -> tuple[mx.array, mx.array]:
        """The loss and the number of its tokens, as ``mlx_lm.tuner.trainer.default_loss``.

        Args:
            model: in training mode, or else the memory loss is left out.
            batch: (B, T + 1) int32, padded behind.
            lengths: (B, 2) int32, where the loss of each row begins, and its tokens.
        """
        self._pass.remaining.clear()
        self._pass.gain, self._pass.keep = model.get(GAIN), model.get(KEEP)
        loss, tokens = default_loss(model, batch, lengths)
        if not model.training:
            return loss, tokens
        if self._pass.remaining:
            real = mx.minimum(lengths[:, 1], batch.shape[1] - 1)
            needed = keys_needed(self._pass.remaining, real)
            if NEEDED in model:
                model[NEEDED] = mx.stop_gradient(needed)
            loss = loss + self._weight * needed.mean() if self._weight else loss
        if UNREPORTED in model:
            model[UNREPORTED] = model[UNREPORTED] + mx.stop_gradient(
                mx.stack([loss, mx.ones_like(loss)])
            )
        return loss, tokens


def linear(first: float, last: float, steps: int) -> Callable[[int], float]:
    """From ``first`` at iteration 1 on a line to ``last``, reached after ``steps`` of them."""

    def value(iteration: int) -> float:
        share = min(1.0, max(0, iteration - 1) / steps)
        return first + (last - first) * share

    return value


def hold(model: nn.Module, **values: Any) -> None:
    """Gives the model arrays that are trained by nobody."""
    for name, value in values.items():
        model[name] = mx.array(value)
    model.freeze(recurse=False, keys=list(values))


def let_go(model: nn.Module) -> None:
    """Takes away what :func:`hold` gave."""
    for name in (GAIN, KEEP, NEEDED, UNREPORTED):
        model.pop(name, None)
