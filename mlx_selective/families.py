"""Where mlx-lm's model of a family departs from the PyTorch model: the config decides here."""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import gpt_neox

from .errors import UserError

EXACT_GELU = ("gelu", "gelu_python")
APPROXIMATE_GELU = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_accurate")


class ExactGELU(gpt_neox.MLP):
    """GPT-NeoX's feed-forward part with x * Phi(x); mlx-lm always uses the tanh approximation."""

    def __call__(self, x):
        return self.dense_4h_to_h(nn.gelu(self.dense_h_to_4h(x)))


def correct_family(model: nn.Module, config: dict[str, Any]) -> None:
    """Makes a fresh mlx-lm model compute what its config says, in place.

    Args:
        model: an mlx-lm model that was built from ``config``.
        config: the whole config.json, with the fields that mlx-lm drops.

    Raises:
        UserError: if the config asks for something that neither mlx-lm nor this computes.
    """
    if model.model_type != "gpt_neox":
        return
    activation = config.get("hidden_act", "gelu")
    if activation not in EXACT_GELU + APPROXIMATE_GELU:
        raise UserError(
            f"config.json: hidden_act {activation!r} is not computed for gpt_neox; "
            f"expected one of {', '.join(EXACT_GELU + APPROXIMATE_GELU)}."
        )
    if activation in EXACT_GELU:
        for layer in model.layers:
            layer.mlp.__class__ = ExactGELU
