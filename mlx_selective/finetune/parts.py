"""The settings of ``mlx-selective finetune`` that have parts: adapters, optimizer, schedule."""

import math
from numbers import Real
from types import SimpleNamespace
from typing import Any

from ..errors import UserError


def check_parts(args: SimpleNamespace) -> None:
    """Refuses parts of the wrong type, which only a -c file can have.

    Raises:
        UserError: naming the part.
    """
    for name in ("lora_parameters", "optimizer_config"):
        if not isinstance(getattr(args, name), dict):
            raise UserError(f"{name} must hold lines of the form name: value.")
    _check_adapter(args.lora_parameters)
    if not isinstance(args.optimizer, str):
        raise UserError(f"--optimizer must be a name, got {args.optimizer!r}.")
    for name, options in args.optimizer_config.items():
        if not isinstance(options, dict):
            raise UserError(f"optimizer_config.{name} must hold lines of the form name: value.")
    if args.lr_schedule is not None:
        _check_schedule(args.lr_schedule)


def _check_adapter(parameters: dict[str, Any]) -> None:
    rank = parameters.get("rank")
    if type(rank) is not int or not 1 <= rank <= 65536:
        raise UserError(f"lora_parameters.rank must be a whole number from 1 on, got {rank!r}.")
    for name, most in (("scale", math.inf), ("dropout", 1)):
        value = parameters.get(name)
        if not (_is_real(value) and 0 <= value < most):
            below = "" if most == math.inf else f" and below {most}"
            raise UserError(
                f"lora_parameters.{name} must be a number from 0 on{below}, got {value!r}."
            )
    keys = parameters.get("keys")
    if keys is not None and not _are_names(keys):
        raise UserError(f"lora_parameters.keys must be a list of names, got {keys!r}.")


def _check_schedule(schedule: Any) -> None:
    from mlx.optimizers import schedulers

    if not isinstance(schedule, dict):
        raise UserError("lr_schedule must hold a name and its arguments.")
    name, arguments = schedule.get("name"), schedule.get("arguments")
    if not isinstance(name, str) or not callable(getattr(schedulers, name, None)):
        raise UserError(f"lr_schedule.name must be a schedule of mlx.optimizers, got {name!r}.")
    numbers = isinstance(arguments, list) and all(map(_is_real, arguments))
    if not numbers or any(value < 0 for value in arguments):
        raise UserError(
            f"lr_schedule.arguments must be a list of numbers from 0 on, got {arguments!r}."
        )


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
