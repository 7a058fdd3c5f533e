"""``mlx-selective finetune``: mlx-lm's lora, and what the attention methods need of it."""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..builtin import BUILTIN_MODEL
from ..errors import UserError
from ..files import check_safetensors
from ..fingerprint import fingerprint
from ..stock_tools.exchange import exchanged
from ..stock_tools.training import train as with_checked_data
from .examples import Examples
from .objective import GAIN, KEEP, linear
from .own_parameters import share_of_own, unfreeze_own
from .settings import buffer_of, check, settings_of
from .training import Run, Stopped

#: layers that are trained where --num-layers does not say, if there are as many
LAYERS = 16


def finetune(lora: Any) -> None:
    """Trains or tests as the flags say.

    Args:
        lora: the module ``mlx_lm.lora``.

    Raises:
        UserError: on a mistake in the flags or the data.
        KeyboardInterrupt: after Ctrl-C, with what is done saved.
    """
    run = lora.run
    defaults = lora.CONFIG_DEFAULTS | {"model": str(BUILTIN_MODEL), "num_layers": None}

    def run_with_ours(args, *more):
        check(args, {action.dest for action in lora.build_parser()._actions} | set(defaults))
        with exchanged(lora, **_parts(lora, args)):
            run(args, *more)

    with exchanged(lora, run=run_with_ours, CONFIG_DEFAULTS=defaults):
        try:
            with_checked_data(lora)
        except Stopped as stop:
            if stop.iteration:
                print(f"Stopped after iteration {stop.iteration}; to go on:\n  {_again()}")
            else:
                print("Stopped before an iteration was done; nothing is saved.")
            raise KeyboardInterrupt from None


def _parts(lora: Any, args: SimpleNamespace) -> dict[str, Any]:
    """What takes the place of parts of mlx-lm's lora."""
    to_lora, train_model, stock_load = lora.linear_to_lora_layers, lora.train_model, lora.load
    evaluate_model = lora.evaluate_model
    kind, written = args.fine_tune_type, {}

    def load(*arguments, **options):
        model, tokenizer = stock_load(*arguments, **options)
        _check_model(model, args)
        if tokenizer.eos_token_id is None:
            raise UserError(f"{args.model}: the tokenizer has no token that ends a text.")
        return model, tokenizer

    def train_layers(model, num_layers, settings, use_dora=False):
        if kind != "temperatures":
            to_lora(model, num_layers, settings, use_dora=use_dora)
            if not tree_flatten(model.trainable_parameters()):
                raise UserError(f"lora_parameters: keys {settings['keys']} name no layer.")
        count = unfreeze_own(model, num_layers)
        if count:
            print(f"The method's own parameters: {share_of_own(model):.3%} of all")
        elif kind == "temperatures":
            raise UserError(f"--num-layers {num_layers}: those layers have no temperatures.")
        if args.resume_adapter_file is not None:
            _check_weights(Path(args.resume_adapter_file).expanduser(), model)

    def train_own_model(args, model, *more):
        if kind == "temperatures":
            args.fine_tune_type = "lora"  # mlx-lm's code knows no other that changes no layer
        train_model(args, model, *more)

    def keep_config(config, path):
        # it is written with the first weights
        written.update(config | {"fine_tune_type": kind})

    def train(model, args: Any, **options):
        own = SimpleNamespace(**vars(own_args) | {"fine_tune_type": kind})
        for part in ("train", "val"):
            options[f"{part}_dataset"].told_as = _file_of(own, part)
            _check_examples(own, part, options[f"{part}_dataset"])
        settings = settings_of(
            own, len(options["train_dataset"]), fingerprint(model, trained=False)
        )
        config = {**written, "attention_kind": _kind(model)}
        Run(own, _schedules(own), settings, config).train(model, args=args, **options)

    def evaluate(args, model, test_set):
        _check_examples(args, "test", Examples(test_set, _file_of(args, "test")))
        evaluate_model(args, model, test_set)

    own_args = args
    return {
        **_header(lora, kind),
        "CacheDataset": Examples,
        "load": load,
        "linear_to_lora_layers": train_layers,
        "train_model": train_own_model,
        "evaluate_model": evaluate,
        "save_config": keep_config,
        "train": train,
    }


def _header(lora: Any, kind: str) -> dict[str, Any]:
    """What mlx-lm shows at the start, with what is really trained; 0.31.3 shows nothing."""
    show = getattr(lora, "print_lora_run_header", None)

    def show_ours(console, args):
        rate = None if args.lr_schedule else args.learning_rate
        layers = "all" if args.num_layers == -1 else args.num_layers
        own = {"fine_tune_type": kind, "num_layers": layers, "learning_rate": rate}
        show(console, SimpleNamespace(**vars(args) | own))

    return {"print_lora_run_header": show_ours} if show else {}


def _kind(model: nn.Module) -> str:
    return getattr(getattr(model, "attention", None), "kind", "softmax")


def _check_model(model: nn.Module, args: SimpleNamespace) -> None:
    """What the flags ask of the model.

    Raises:
        UserError: if it has not got that.
    """
    if args.num_layers is None:
        args.num_layers = min(LAYERS, len(model.layers))
    attention = getattr(model, "attention", None)
    asked = {
        "--memory-loss": args.memory_loss,
        "--retrofit": args.retrofit,
        "--shrink-buffer": args.shrink_buffer,
    }
    if not getattr(attention, "prunable", False):
        for flag, value in asked.items():
            if value:
                raise UserError(
                    f"{flag} needs a model with selective attention; this is {_kind(model)}."
                )
    if args.fine_tune_type == "temperatures" and not getattr(attention, "own_parameters", ()):
        raise UserError(
            f"--fine-tune-type temperatures needs a model with SSA; this is {_kind(model)}."
        )
    quantised = any(hasattr(module, "bits") for _, module in model.named_modules())
    if args.fine_tune_type == "full" and quantised:
        raise UserError("--fine-tune-type full: quantised weights have no gradients; use lora.")


def _check_weights(file: Path, model: nn.Module) -> None:
    """Whether a file of ``--resume-adapter-file`` holds what is trained here.

    Raises:
        UserError: naming what does not fit.
    """
    check_safetensors(file)
    own = dict(tree_flatten(model.trainable_parameters()))
    for name, value in mx.load(str(file)).items():
        if name not in own:
            raise UserError(f"{file}: {name} is not trained here.")
        if value.shape != own[name].shape:
            raise UserError(f"{file}: {name} has shape {value.shape}, here {own[name].shape}.")


def _file_of(args: SimpleNamespace, part: str) -> Path:
    return Path(args.data) / f"{'valid' if part == 'val' else part}.jsonl"


def _check_examples(args: SimpleNamespace, part: str, dataset: Any) -> None:
    """Refuses too few examples, and those of which nothing is left: their loss is no number.

    Raises:
        UserError: naming the file, and the line of the first one.
    """
    file = _file_of(args, part)
    if 0 < len(dataset) < args.batch_size:
        raise UserError(
            f"{file} holds {len(dataset)} examples, fewer than --batch-size {args.batch_size}."
        )
    for index in range(len(dataset) if args.mask_prompt else 0):
        tokens, prompt = dataset[index]
        if prompt >= min(len(tokens), args.max_seq_length):
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
        budget = linear(*buffer_of(args), max(1, args.iters - 1))
        schedules[KEEP] = lambda iteration: round(budget(iteration))
    return schedules


def _again() -> str:
    """The command that goes on."""
    flags = [flag for flag in sys.argv[1:] if flag != "--resume"]
    return shlex.join([*sys.argv[0].split(), *flags, "--resume"])
