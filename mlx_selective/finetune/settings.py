"""The settings of ``mlx-selective finetune``: our flags beside mlx-lm's, checked when merged."""

import argparse
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import UserError
from .adapters import FINE_TUNE_TYPES

#: flags of our own, whose defaults are filled in after those of mlx-lm's -c file
DEFAULTS = {
    "memory_loss": 0.0,
    "retrofit": False,
    "retrofit_iters": None,
    "shrink_buffer": None,
    "resume": False,
}
#: the smallest value of settings that are whole numbers; -1 may stand for all
_LEAST = {
    **dict.fromkeys(("iters", "batch_size", "steps_per_report", "steps_per_eval", "save_every"), 1),
    **{"grad_accumulation_steps": 1, "max_seq_length": 2, "seed": 0, "retrofit_iters": 1},
    **{"val_batches": 1, "test_batches": 1, "num_layers": 1},
}
_ALL = ("val_batches", "test_batches", "num_layers")
#: seeds that leave room for one of each epoch
_LARGEST_SEED = 2**31
#: settings that a stopped training must be resumed with
_SAME = (
    *("seed", "batch_size", "max_seq_length", "fine_tune_type", "num_layers", "optimizer"),
    *("optimizer_config", "learning_rate", "lr_schedule", "lora_parameters", "mask_prompt"),
    *("grad_accumulation_steps", "memory_loss", "retrofit", "retrofit_iters", "shrink_buffer"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds our flags to mlx-lm's."""
    kinds = next(a for a in parser._actions if "--fine-tune-type" in a.option_strings)
    kinds.choices = list(FINE_TUNE_TYPES)
    kinds.help = "lora, dora, full, or temperatures: those of SSA alone."
    parser.add_argument(
        "--memory-loss",
        type=float,
        help="Weight of the memory loss of selective attention (default 0; the paper has 0.1).",
    )
    parser.add_argument(
        "--retrofit",
        action="store_true",
        default=None,
        help="Start at the softmax model: what head 0 selects is multiplied by 0, later by 1.",
    )
    parser.add_argument(
        "--retrofit-iters", type=int, help="Iterations from 0 to 1 (default half of --iters)."
    )
    parser.add_argument(
        "--shrink-buffer",
        metavar="FROM:TO",
        help="Train with this many keys a layer, fewer and fewer; the others are dropped.",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        default=None,
        help="Go on where the training in --adapter-path was stopped.",
    )


def check(args: SimpleNamespace) -> None:
    """Fills in our defaults, and refuses what cannot be, from flags and a -c file alike.

    Raises:
        UserError: naming the setting.
    """
    for name in vars(args):
        if "-" in name:
            raise UserError(f"--config: {name} must be written {name.replace('-', '_')}.")
    for name, value in DEFAULTS.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    for name, least in _LEAST.items():
        _check_number(name, getattr(args, name), least)
    for name in ("memory_loss", *(() if args.lr_schedule else ("learning_rate",))):
        value = getattr(args, name)
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not 0 <= value < float("inf"):
            raise UserError(f"{_flag(name)} must be a number, 0 or more, got {value!r}.")
    for name in ("retrofit", "resume", "train", "test", "mask_prompt", "grad_checkpoint"):
        if not isinstance(getattr(args, name), bool):
            raise UserError(f"{_flag(name)} must be true or false, got {getattr(args, name)!r}.")
    for name in ("lora_parameters", "optimizer_config"):
        if not isinstance(getattr(args, name), dict):
            raise UserError(f"{name} must hold lines of the form name: value.")
    if args.fine_tune_type not in FINE_TUNE_TYPES:
        raise UserError(
            f"--fine-tune-type must be one of {', '.join(FINE_TUNE_TYPES)}, "
            f"got {args.fine_tune_type!r}."
        )
    _check_training(args)


def _check_training(args: SimpleNamespace) -> None:
    """What of the settings goes together."""
    if args.seed > _LARGEST_SEED:
        raise UserError(f"--seed must be at most {_LARGEST_SEED}, got {args.seed}.")
    if args.train and args.iters < args.grad_accumulation_steps:
        raise UserError(
            f"--iters {args.iters} are fewer than --grad-accumulation-steps "
            f"{args.grad_accumulation_steps}: nothing would be trained."
        )
    if args.retrofit:
        if args.iters < 2:
            raise UserError("--retrofit needs 2 --iters or more.")
        args.retrofit_iters = args.retrofit_iters or args.iters // 2
        if args.retrofit_iters >= args.iters:
            raise UserError(
                f"--retrofit-iters must be from 1 to --iters - 1, {args.iters - 1}, so that the "
                f"model ends with selective attention; got {args.retrofit_iters}."
            )
    elif args.retrofit_iters is not None:
        raise UserError("--retrofit-iters goes with --retrofit.")
    if args.shrink_buffer is not None:
        buffer_of(args)
    for name in ("resume", "retrofit"):
        if getattr(args, name) and not args.train:
            raise UserError(f"{_flag(name)} goes with --train.")
    if args.resume:  # its weights are in the state
        args.resume_adapter_file = None


def _check_number(name: str, value: Any, least: int) -> None:
    if value is None or (value == -1 and name in _ALL):
        return
    if type(value) is not int or value < least:
        more = ", or -1 for all" if name in _ALL else ""
        raise UserError(
            f"{_flag(name)} must be a whole number, at least {least}{more}, got {value!r}."
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def buffer_of(args: SimpleNamespace) -> tuple[int, int]:
    """FROM:TO of ``--shrink-buffer`` as two numbers.

    Raises:
        UserError: if it is not that.
    """
    first, _, last = str(args.shrink_buffer).partition(":")
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(last) <= int(first)):
        raise UserError(
            "--shrink-buffer must be FROM:TO, keys a layer at the begin and at the end, 2 or more "
            f'and falling, such as 512:128 (in a file "512:128"); got {args.shrink_buffer!r}.'
        )
    return int(first), int(last)


def settings_of(args: SimpleNamespace, examples: int) -> dict[str, Any]:
    """What has to be the same for a training to go on, of which ``examples`` of data is a part."""
    own = {name: getattr(args, name, None) for name in _SAME}
    if args.shrink_buffer is not None:
        own["iters"] = args.iters
    for name in ("model", "data"):
        path = Path(str(getattr(args, name))).expanduser()
        own[name] = str(path.resolve()) if path.exists() else str(path)
    return own | {"number of examples": examples}
