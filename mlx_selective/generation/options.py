"""Flags that generate and chat share, named as in mlx-lm."""

import argparse
import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.sample_utils import make_sampler

from ..budget.flags import add_budget_arguments
from ..builtin import BUILTIN_MODEL
from .stream import PREFILL_STEP_SIZE


def between(kind: type, low: float, high: float = math.inf) -> Callable[[str], Any]:
    """argparse type: a finite int or float from low to high."""

    def parse(text: str):
        """The number that a flag gives, if it lies within the bounds."""
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            bounds = f"at least {low}" if high == math.inf else f"from {low} to {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


positive = between(int, 1)


def unicode_text(text: str) -> str:
    """argparse type: text in which bytes that are not UTF-8 became U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how many keys its layers keep."""
    add_model_argument(parser)
    add_budget_arguments(parser)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Which model, with which adapter."""
    parser.add_argument(
        "--model",
        default=str(BUILTIN_MODEL),
        help="Folder of a converted model, or its Hub id (default: the built-in model).",
    )
    parser.add_argument("--adapter-path", help="Path of trained adapter weights and config.")


def add_sampling_arguments(
    parser: argparse.ArgumentParser, *, max_tokens: int, seed: int | None
) -> None:
    """How tokens are chosen."""
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=positive,
        default=max_tokens,
        help=f"Maximum number of tokens to generate (default: {max_tokens}).",
    )
    parser.add_argument(
        "--temp", type=between(float, 0), default=0.0, help="Sampling temperature (0.0)."
    )
    probability = between(float, 0, 1)
    parser.add_argument("--top-p", type=probability, default=1.0, help="Sampling top-p (1.0).")
    parser.add_argument("--min-p", type=probability, default=0.0, help="Sampling min-p (0.0).")
    parser.add_argument("--top-k", type=between(int, 0), default=0, help="Sampling top-k (0: off).")
    parser.add_argument(
        "--seed", type=between(int, 0, 2**64 - 1), default=seed, help=f"PRNG seed ({seed})."
    )
    parser.add_argument(
        "--prefill-step-size",
        type=positive,
        default=PREFILL_STEP_SIZE,
        help=f"Prompt tokens to process at a time (default: {PREFILL_STEP_SIZE}).",
    )
    parser.add_argument(
        "--system-prompt", type=unicode_text, help="System prompt for the chat template."
    )


def sampler_from(args: argparse.Namespace, model: nn.Module) -> Callable[[mx.array], mx.array]:
    """mlx-lm's sampler for the flags, seeded."""
    if args.seed is not None:
        mx.random.seed(args.seed)
    # mlx-lm refuses a top-k that leaves nothing out.
    top_k = args.top_k if args.top_k < getattr(model.args, "vocab_size", math.inf) else 0
    return make_sampler(args.temp, args.top_p, args.min_p, top_k=top_k)
