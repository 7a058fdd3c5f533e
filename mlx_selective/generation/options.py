"""Flags that generate and chat share, named as in mlx-lm."""

import argparse
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..builtin import BUILTIN_MODEL
from .stream import PREFILL_STEP_SIZE


def positive(text: str) -> int:
    """argparse type: an int of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how many keys its layers keep."""
    parser.add_argument(
        "--model",
        default=str(BUILTIN_MODEL),
        help="Folder of a converted model, or its Hub id (default: the built-in model).",
    )
    parser.add_argument("--adapter-path", help="Path of trained adapter weights and config.")
    parser.add_argument(
        "--budget",
        type=int,
        help="Keys each layer keeps (selective attention; default: as the model's config says).",
    )


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
    parser.add_argument("--temp", type=float, default=0.0, help="Sampling temperature (0.0).")
    parser.add_argument("--top-p", type=float, default=1.0, help="Sampling top-p (1.0).")
    parser.add_argument("--min-p", type=float, default=0.0, help="Sampling min-p (0.0).")
    parser.add_argument("--top-k", type=int, default=0, help="Sampling top-k (0: off).")
    parser.add_argument("--seed", type=int, default=seed, help=f"PRNG seed ({seed}).")
    parser.add_argument(
        "--prefill-step-size",
        type=positive,
        default=PREFILL_STEP_SIZE,
        help=f"Prompt tokens to process at a time (default: {PREFILL_STEP_SIZE}).",
    )
    parser.add_argument("--system-prompt", help="System prompt for the chat template.")


def sampler_from(args: argparse.Namespace) -> Callable[[mx.array], mx.array]:
    """mlx-lm's sampler for the flags, seeded."""
    if args.seed is not None:
        mx.random.seed(args.seed)
    return make_sampler(args.temp, args.top_p, args.min_p, top_k=args.top_k)


def chat_prompt(
    tokenizer: TokenizerWrapper, text: str, system_prompt: str | None
) -> str | list[int]:
    """The prompt for one user message: through the chat template if there is one."""
    if not tokenizer.has_chat_template:
        return text
    messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
    messages.append({"role": "user", "content": text})
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True)
