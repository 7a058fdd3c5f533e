"""``mlx-selective lora | fuse | server | benchmark | cache_prompt``: mlx-lm's tools, our models.

A tool runs in this process with its own flags. It opens models through four functions of
``mlx_lm.utils``; ours take their place meanwhile, and run no code of a model folder.
"""

import argparse
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import yaml
from mlx_lm import utils as mlx_lm_utils

from .. import cache  # mlx-lm then finds the pruned cache by name
from ..builtin import BUILTIN_MODEL
from ..cli import OneLineParser
from ..errors import UserError
from ..files import one_line, read_json
from ..finetune.command import finetune
from ..finetune.settings import add_arguments
from ..loading import model_folder, open_adapters, open_model, open_tokenizer
from ..model import MODEL_TYPE
from .exchange import exchanged
from .fusing import fuse
from .server import serve
from .training import train

#: Tools that open the built-in model where no --model is given.
_BUILTIN_BY_DEFAULT = ("server", "benchmark", "cache_prompt")  # finetune: a -c file goes before it
#: mlx-lm's modules behind commands of another name
_MODULES = {"finetune": "lora"}
_TRUST = "--trust-remote-code"
#: Counts that mlx-lm fails at, far from the flag, when they are below 1.
_COUNTS = (
    *("iters", "batch_size", "steps_per_report", "steps_per_eval", "save_every"),
    *("grad_accumulation_steps", "max_seq_length"),
    *("prompt_tokens", "generation_tokens", "num_trials", "prefill_step_size"),
)
#: What mlx-lm and its libraries raise at a user's mistake, such as a wrong type in lora's settings.
_MISTAKES = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(ImportError, RuntimeError, jinja2.TemplateError, yaml.YAMLError),
)


def run(command: str, arguments: list[str]) -> None:
    """Runs a tool of mlx-lm.

    Args:
        command: its name, as in ``mlx_lm.NAME``.
        arguments: its flags.

    Raises:
        UserError: on a mistake in the flags, or in a folder or file that they name.
    """
    tool = importlib.import_module(f"mlx_lm.{_MODULES.get(command, command)}")
    # Of two values of a flag the later counts, so that the user's --model goes before this.
    default = ["--model", str(BUILTIN_MODEL)] if command in _BUILTIN_BY_DEFAULT else []
    parser = {**vars(argparse), "ArgumentParser": _parser_class(command)}
    opened: dict[str, Any] = {}
    starts = {"server": serve, "lora": train, "finetune": finetune}
    starts["fuse"] = partial(fuse, opened=opened)
    start = starts.get(command, lambda tool: tool.main())
    with (
        exchanged(mlx_lm_utils, **_openers(command, arguments, opened)),
        exchanged(tool, argparse=types.SimpleNamespace(**parser)),
        exchanged(sys, argv=[f"mlx-selective {command}", *default, *arguments]),
    ):
        try:
            start(tool)
        except UserError:
            raise
        except _MISTAKES as error:
            kind = "" if isinstance(error, ValueError) else f" ({type(error).__name__})"
            raise UserError(one_line(error) + kind) from error


def _openers(command: str, arguments: list[str], opened: dict[str, Any]) -> dict[str, Callable]:
    """What takes the place of the functions by which mlx-lm opens a model folder.

    ``opened`` gets the ``config`` and, with its adapter, the ``model``.
    """
    trust = _TRUST in arguments
    kv_bits = any(argument.split("=")[0] == "--kv-bits" for argument in arguments)

    def open_model_(folder, lazy=False, strict=True, model_config=None, **options):
        model, config = open_model(
            folder,
            lazy,
            strict=strict,
            model_config=model_config,
            trust_remote_code=trust or options.get("trust_remote_code", False),
            keep_dtype=command == "fuse",
        )
        if kv_bits:
            cache.refuse_quantised_keys(cache.make_prompt_cache(model))
        opened["config"] = config
        return model, config

    def open_adapters_(model, adapter_path):
        opened["model"] = model = open_adapters(model, adapter_path)
        if "attention" in opened["config"]:  # an adapter may change it; fuse writes it
            opened["config"]["attention"] = model.attention.to_dict()
        return model

    def open_tokenizer_(folder, tokenizer_config_extra=None, eos_token_ids=None):
        ours = read_json(Path(folder) / "config.json").get("model_type") == MODEL_TYPE
        # Some tools trust a tokenizer's code unasked.
        config = {**(tokenizer_config_extra or {}), "trust_remote_code": trust and not ours}
        try:
            return open_tokenizer(Path(folder), config, eos_token_ids)
        except Exception as error:  # transformers' many ways
            raise UserError(f"{folder} cannot be loaded: {one_line(error)}") from error

    return {
        "_download": model_folder,
        "load_model": open_model_,
        "load_adapters": open_adapters_,
        "load_tokenizer": open_tokenizer_,
    }


def _parser_class(command: str) -> type[argparse.ArgumentParser]:
    """The tool's parser under our name, which tells a mistake in one line."""

    class Parser(OneLineParser):
        def __init__(self, *args, **options):
            super().__init__(*args, **{**options, "prog": f"mlx-selective {command}"})

        def parse_args(self, *args, **options):
            with suppress(argparse.ArgumentError):  # in mlx-lm 0.31 not all tools have it
                self.add_argument(_TRUST, action="store_true", help="Trust a folder's code.")
            if command == "finetune":
                add_arguments(self)
            parsed = super().parse_args(*args, **options)
            if (
                command == "fuse"
                and Path(parsed.save_path).resolve() == Path(parsed.model).resolve()
            ):
                self.error("--save-path is the folder of --model, which would be written over")
            for name in _COUNTS:
                count = getattr(parsed, name, None)
                if count is not None and count < 1:
                    self.error(f"--{name.replace('_', '-')} must be at least 1, got {count}")
            return parsed

    return Parser
