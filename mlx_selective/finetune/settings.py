"""The settings of ``mlx-selective finetune``: our flags beside mlx-lm's, checked when merged."""

import argparse
import os
from difflib import get_close_matches
from hashlib import sha256
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import UserError
from .adapters import CONFIG, FINE_TUNE_TYPES, WEIGHTS
from .parts import check_parts
from .progress import CURVE
from .state import FILE

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
#: what mlx-lm reads of a -c file beside its flags
_OF_DATASETS = {"hf_dataset"} | {
    f"{part}_feature" for part in ("prompt", "completion", "chat", "text", "system")
}
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


def check(args: SimpleNamespace, known: set[str]) -> None:
    """Fills in our defaults, and refuses what cannot be, from flags and a -c file alike.

    Args:
        args: the settings, in which paths are then absolute where they began with ~.
        known: names of mlx-lm's settings.

    Raises:
        UserError: naming the setting.
    """
    known = known | DEFAULTS.keys() | _OF_DATASETS
    for name in vars(args):
        if name not in known:
            near = get_close_matches(str(name).replace("-", "_"), known, 1)
            hint = f" (perhaps {near[0]})" if near else ""
            raise UserError(f"--config: {name} is no setting{hint}.")
    _check_paths(args)
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
    check_parts(args)
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


def _check_paths(args: SimpleNamespace) -> None:
    """Of files and folders, before a model is opened: texts, and where there can be some."""
    for name in ("model", "data", "adapter_path", "resume_adapter_file"):
        value = getattr(args, name)
        if value is None and name == "resume_adapter_file":
            continue
        if not isinstance(value, str):
            raise UserError(f"{_flag(name)} must be text, got {value!r}.")
        if value.startswith("~"):
            setattr(args, name, os.path.expanduser(value))
    if args.resume_adapter_file is not None and not os.path.isfile(args.resume_adapter_file):
        raise UserError(f"--resume-adapter-file {args.resume_adapter_file}: no such file.")
    if args.train:
        _check_folder(Path(args.adapter_path))


def _check_folder(folder: Path) -> None:
    """Whether an adapter can be written to a folder, which need not be there yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UserError(f"--adapter-path {folder}: {there} is a file; give a folder.")
    if not os.access(there, os.W_OK):
        raise UserError(f"--adapter-path {folder}: {there} cannot be written to.")
    for name in (WEIGHTS, CONFIG, FILE, CURVE):
        if (folder / name).is_dir():
            raise UserError(f"--adapter-path {folder}: {name} is a folder there; take it away.")


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


def settings_of(args: SimpleNamespace, examples: int, parameters: str) -> dict[str, Any]:
    """What has to be the same for a training to go on.

    Args:
        args: the settings.
        examples: how many there are to train with.
        parameters: the fingerprint of what is not trained of the model.
    """
    own = {name: getattr(args, name, None) for name in _SAME}
    if args.shrink_buffer is not None:
        own["iters"] = args.iters
    for name in ("model", "data"):
        path = Path(str(getattr(args, name))).expanduser()
        own[name] = str(path.resolve()) if path.exists() else str(path)
    own |= {"number of examples": examples, "the model's parameters": parameters[:16]}
    file = Path(args.data) / "train.jsonl"
    if file.is_file():
        own["the content of train.jsonl"] = sha256(file.read_bytes()).hexdigest()[:16]
    return own
