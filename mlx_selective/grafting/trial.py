"""A trial run of a layer's attention code: what arrives where a method would take over."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention import AttentionShape
from ..errors import UserError
from .attention_code import INTERCEPTED, AttentionCode
from .projections import shows_projections
from .refusals import config_parts


class _Trial:
    """Stands where a LayerCall will be, and notes what arrives."""

    offset = 0

    def __init__(self):
        self.rotated, self.stored, self.arrived = 0, [], []

    def rotate(self, rope, x, *args, **kwargs):
        self.rotated = getattr(rope, "dims", x.shape[-1])
        return x

    def update_and_fetch(self, keys, values):
        self.stored.append((keys, values))
        return keys, values

    def attend(self, queries, keys, values, scale):
        self.arrived.append((queries, keys, values))
        return mx.zeros((*queries.shape[:3], values.shape[3]), queries.dtype)

    def __getattr__(self, name):
        raise UserError(f"it uses cache.{name}, which a graft does not have")

    def __getitem__(self, index):
        raise UserError("it keeps several caches in one, such as an indexer's")


def try_out(module: nn.Module, features: int) -> AttentionShape:
    """Runs a layer's attention code, unevaluated, and tells the sizes of what it does.

    Args:
        module: mlx-lm's attention module.
        features: width C of its input.

    Raises:
        UserError: if the code does anything that a graft would not carry over.
    """
    # One token and several: decoding is code of its own in some families.
    one, two = (_sizes(module, features, length) for length in (1, 2))
    if one != two:
        raise UserError(
            f"{type(module).__name__} cannot be grafted: it reads one token with other sizes "
            f"({one}) than several ({two})."
        )
    return replace(one, shows_projections=shows_projections(module, one))


def _sizes(module, features, length):
    trial, name = _Trial(), type(module).__name__
    code = AttentionCode(type(module))
    try:
        x = mx.zeros((1, length, features))
        code.run(trial, code.bind(module, (x,), code.extra_arguments()))
    except UserError as error:
        raise UserError(f"{name} cannot be grafted: {error}.") from None
    except Exception as error:  # whatever foreign code makes of a cache that it does not expect
        raise UserError(
            f"{name} cannot be grafted: its attention does not run by itself "
            f"({type(error).__name__}: {error})."
        ) from error
    for calls, what in ((trial.stored, "cache.update_and_fetch"), (trial.arrived, INTERCEPTED)):
        if len(calls) != 1:
            raise UserError(
                f"{name} cannot be grafted: it calls {what} {len(calls)} times, not once."
            )
    (stored, _), (queries, keys, values) = trial.stored[0], trial.arrived[0]
    if queries.shape[1] % keys.shape[1] or queries.shape[3] != keys.shape[3]:
        raise UserError(
            f"{name} cannot be grafted: queries {queries.shape} do not fit keys {keys.shape}."
        )
    return AttentionShape(
        features=features,
        heads=queries.shape[1],
        key_heads=stored.shape[1],  # some families repeat them after the cache
        head_size=queries.shape[3],
        value_size=values.shape[3],
        rotated=trial.rotated,
        scaled_by_position=code.scales_by_position,
    )


def model_width(config: Mapping[str, Any]) -> int:
    """The width C of a model's layers, from the fields of its ModelArgs.

    Raises:
        UserError: if no field tells.
    """
    names = ("hidden_size", "n_embd", "model_dim", "d_model", "dim")
    for part in config_parts(config):
        for name in names:
            if isinstance(part.get(name), int):
                return part[name]
    raise UserError(f"this model cannot be grafted: its config has none of {', '.join(names)}.")
