"""A trial run of a layer's attention code: what arrives where a method would take over."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..attention import AttentionShape
from ..errors import UserError
from .attention_code import INTERCEPTED, AttentionCode
from .refusals import config_parts


class _Trial:
    """Stands where a LayerCall will be, and notes what arrives."""

    def __init__(self):
        self.rotated, self.turned, self.stored, self.arrived = 0, [], [], []
        self.position_read = False

    @property
    def offset(self):
        self.position_read = True
        return 0

    def rotate(self, rope, x, *args, **kwargs):
        self.rotated = getattr(rope, "dims", x.shape[-1])
        self.turned.append(x.shape)
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


class _MarkingTrial(_Trial):
    """Marks the first array that is turned, by a second row, which shows unevaluated."""

    def rotate(self, rope, x, *args, **kwargs):
        super().rotate(rope, x, *args, **kwargs)
        return mx.concatenate([x, x]) if len(self.turned) == 1 else x

    def attend(self, queries, keys, values, scale):
        return super().attend(queries, keys, values, scale)[:1]


def try_out(module: nn.Module, features: int) -> AttentionShape:
    """Runs a layer's attention code, unevaluated, and tells the sizes of what it does.

    Args:
        module: mlx-lm's attention module.
        features: width C of its input.

    Raises:
        UserError: if the code does anything that a graft would not carry over.
    """
    code = AttentionCode(type(module))
    # One token and several: decoding is code of its own in some families.
    one, two = (_shape(code, module, features, length) for length in (1, 2))
    if replace(one, shows_projections=two.shows_projections) != two:
        raise UserError(
            f"{type(module).__name__} cannot be grafted: it reads one token with other sizes "
            f"({one}) than several ({two})."
        )
    return replace(one, shows_projections=one.shows_projections and two.shows_projections)


def _shape(code, module, features, length):
    """The sizes of a call with so many tokens."""
    trial, name = _Trial(), type(module).__name__
    try:
        _run(code, module, features, length, trial)
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
    shape = AttentionShape(
        features=features,
        heads=queries.shape[1],
        key_heads=stored.shape[1],  # some families repeat them after the cache
        head_size=queries.shape[3],
        value_size=values.shape[3],
        rotated=trial.rotated,
        scaled_by_position=code.scales_by_position,
    )
    return replace(shape, shows_projections=_shows_projections(code, module, shape, length, trial))


def _shows_projections(code, module, shape, length, trial):
    """Whether whole queries, then whole keys, are turned by the layer's rope, or none at all."""
    if not trial.turned:
        # A position that is read, though not by rope, turns queries out of sight.
        return not trial.position_read
    whole = [(1, heads, length, shape.head_size) for heads in (shape.heads, shape.key_heads)]
    if trial.turned != whole:
        return False
    marking = _MarkingTrial()
    try:
        _run(code, module, shape.features, length, marking)
    except Exception:  # whatever foreign code makes of the mark
        return False
    queries, keys, _ = marking.arrived[0]
    return len(queries) == 2 and len(keys) == 1


def _run(code, module, features, length, trial):
    x = mx.zeros((1, length, features))
    code.run(trial, code.bind(module, (x,), code.extra_arguments()))


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
