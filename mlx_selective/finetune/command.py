"""``mlx-selective finetune``: mlx-lm's lora, and what the attention methods need of it."""

import argparse
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn

from ..builtin import BUILTIN_MODEL
from ..errors import UserError
from ..stock_tools.exchange import exchanged
from ..stock_tools.training import train as with_checked_data
from . import adapters
from .objective import GAIN, KEEP, linear
from .own_parameters import share_of_own, unfreeze_own
from .training import Run, Stopped

#: flags of our own, whose defaults are filled in after those of mlx-lm's -c file
DEFAULTS = {
    "memory_loss": 0.0,
    "retrofit": False,
    "retrofit_iters": None,
    "shrink_buffer": None,
    "resume": False,
}
#: layers that are trained where --num-layers does not say, if there are as many
LAYERS = 16
#: settings that a stopped training must be resumed with
_SAME = (
    *("model", "data", "seed", "batch_size", "max_seq_length", "fine_tune_type", "num_layers"),
    *("optimizer", "learning_rate", "lr_schedule", "lora_parameters", "mask_prompt"),
    *("grad_accumulation_steps", "memory_loss", "retrofit", "retrofit_iters", "shrink_buffer"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds our flags to mlx-lm's."""
    kinds = next(a for a in parser._actions if "--fine-tune-type" in a.option_strings)
    kinds.choices = list(adapters.FINE_TUNE_TYPES)
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


def finetune(lora: Any) -> None:
    """Trains or tests as the flags say.

    Args:
        lora: the module ``mlx_lm.lora``.

    Raises:
        UserError: on a mistake in the flags or the data.
        KeyboardInterrupt: after Ctrl-C, with what is done saved.
    """
    run = lora.run

    def run_with_ours(args, *more):
        _check(args)
        with exchanged(lora, **_parts(lora, args)):
            run(args, *more)

    defaults = lora.CONFIG_DEFAULTS | {"num_layers": None}
    with exchanged(lora, run=run_with_ours, CONFIG_DEFAULTS=defaults):
        try:
            with_checked_data(lora)
        except Stopped as stop:
            if stop.iteration:
                print(f"Stopped after iteration {stop.iteration}; to go on:\n  {_again()}")
            raise KeyboardInterrupt from None


def _check(args: SimpleNamespace) -> None:
    """Fills in our defaults, and refuses what cannot be.

    Raises:
        UserError: naming the flag.
    """
    for name, value in DEFAULTS.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    if type(args.memory_loss) not in (int, float) or not 0 <= args.memory_loss < float("inf"):
        raise UserError(f"--memory-loss must be 0 or more, got {args.memory_loss!r}.")
    if args.retrofit:
        if args.retrofit_iters is None:
            args.retrofit_iters = max(1, args.iters // 2)
        if not 1 <= args.retrofit_iters < args.iters:
            raise UserError(
                f"--retrofit-iters must be from 1 to --iters - 1, {args.iters - 1}, so that the "
                f"model ends with selective attention; got {args.retrofit_iters}."
            )
    elif args.retrofit_iters is not None:
        raise UserError("--retrofit-iters goes with --retrofit.")
    if args.shrink_buffer is not None:
        _buffer(args.shrink_buffer)
    if args.resume and args.resume_adapter_file:
        raise UserError("--resume and --resume-adapter-file exclude each other.")
    if (args.resume or args.retrofit) and not args.train:
        raise UserError(f"--{'resume' if args.resume else 'retrofit'} goes with --train.")


def _buffer(text: Any) -> tuple[int, int]:
    """FROM:TO as two numbers.

    Raises:
        UserError: if it is not that.
    """
    first, _, last = str(text).partition(":")
    if not (first.isdecimal() and last.isdecimal() and 2 <= int(last) <= int(first)):
        raise UserError(
            "--shrink-buffer must be FROM:TO, keys a layer at the begin and at the end, "
            f"2 or more and falling, such as 512:128; got {text!r}."
        )
    return int(first), int(last)


def _parts(lora: Any, args: SimpleNamespace) -> dict[str, Any]:
    """What takes the place of parts of mlx-lm's lora."""
    to_lora, train_model, stock_load = lora.linear_to_lora_layers, lora.train_model, lora.load
    written: dict[str, Any] = {}

    def load(*arguments, **options):
        model, tokenizer = stock_load(*arguments, **options)
        _check_model(model, args)
        if tokenizer.eos_token_id is None:
            raise UserError(f"{args.model}: the tokenizer has no token that ends a text.")
        return model, tokenizer

    def train_layers(model, num_layers, settings, use_dora=False):
        if written["fine_tune_type"] != "temperatures":
            to_lora(model, num_layers, settings, use_dora=use_dora)
        if unfreeze_own(model, num_layers):
            print(f"The method's own parameters: {share_of_own(model):.3%} of all")

    def train_own_model(args, model, *more):
        written["fine_tune_type"] = args.fine_tune_type
        if args.fine_tune_type == "temperatures":
            args.fine_tune_type = "lora"  # mlx-lm's code knows no other that changes no layer
        train_model(args, model, *more)

    def save_config(config, path):
        written.update(config | {"fine_tune_type": written["fine_tune_type"]}, path=path)

    def train(model, args: Any, **options):
        if own_args.mask_prompt:
            for part in ("train", "val"):
                _check_prompts(own_args, part, options[f"{part}_dataset"])

        def write_config(model: nn.Module) -> None:
            config = {name: value for name, value in written.items() if name != "path"}
            attention = _attention_now(model)
            adapters.save_config(config | attention, written["path"])

        write_config(model)
        Run(own_args, _schedules(own_args), _settings(own_args, written), write_config).train(
            model, args=args, **options
        )

    own_args = args
    return {
        "load": load,
        "linear_to_lora_layers": train_layers,
        "train_model": train_own_model,
        "save_config": save_config,
        "train": train,
    }


def _check_model(model: nn.Module, args: SimpleNamespace) -> None:
    """What the flags ask of the model.

    Raises:
        UserError: if it has not got that.
    """
    if args.num_layers is None:
        args.num_layers = min(LAYERS, len(model.layers))
    attention = getattr(model, "attention", None)
    kind = getattr(attention, "kind", "softmax")
    asked = {
        "--memory-loss": args.memory_loss,
        "--retrofit": args.retrofit,
        "--shrink-buffer": args.shrink_buffer,
    }
    if not getattr(attention, "prunable", False):
        for flag, value in asked.items():
            if value:
                raise UserError(f"{flag} needs a model with selective attention; this is {kind}.")
    if args.fine_tune_type == "temperatures" and not getattr(attention, "own_parameters", ()):
        raise UserError(f"--fine-tune-type temperatures needs a model with SSA; this is {kind}.")


def _check_prompts(args: SimpleNamespace, part: str, dataset: Any) -> None:
    """Refuses examples of which nothing is left to learn: their loss would be no number.

    Raises:
        UserError: naming the first one.
    """
    for index in range(len(dataset)):
        tokens, prompt = dataset[index]
        if prompt >= min(len(tokens), args.max_seq_length):
            file = Path(args.data) / f"{'valid' if part == 'val' else part}.jsonl"
            raise UserError(
                f"{file}, line {index + 1}: the prompt takes {prompt} of {len(tokens)} tokens, so "
                f"that --mask-prompt and --max-seq-length {args.max_seq_length} leave nothing to "
                "learn; raise the length, or take the example away."
            )


def _schedules(args: SimpleNamespace) -> dict[str, Any]:
    schedules = {}
    if args.retrofit:
        schedules[GAIN] = linear(0.0, 1.0, args.retrofit_iters)
    if args.shrink_buffer is not None:
        budget = linear(*_buffer(args.shrink_buffer), max(1, args.iters - 1))
        schedules[KEEP] = lambda iteration: round(budget(iteration))
    return schedules


def _settings(args: SimpleNamespace, written: dict[str, Any]) -> dict[str, Any]:
    """What has to be the same for a training to go on."""
    own = {name: getattr(args, name, None) for name in _SAME}
    return own | {"fine_tune_type": written["fine_tune_type"], "model": str(args.model)}


def _attention_now(model: nn.Module) -> dict[str, Any]:
    """The attention settings of the moment, for adapter_config.json: only while F has a gain."""
    gain = model.get(GAIN)
    if gain is None or gain.item() == 1:
        return {}
    settings = model.attention.to_dict()
    layers = settings if isinstance(settings, list) else [settings]
    for layer in layers:
        if layer["kind"] == "selective":
            layer["gain"] = gain.item()
    return {"attention": settings}


def _again() -> str:
    """The command that goes on."""
    flags = [flag for flag in sys.argv[1:] if flag != "--resume"]
    if flags[:2] == ["--model", str(BUILTIN_MODEL)]:
        del flags[:2]
    return shlex.join([*sys.argv[0].split(), *flags, "--resume"])
