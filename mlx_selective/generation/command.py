"""``mlx-selective generate``."""

import argparse
import json
import sys

from ..budget.flags import load_within
from ..builtin import BUILTIN_MODEL
from ..cache import account, make_prompt_cache
from ..errors import UserError
from ..loading import load
from .chat_template import chat_prompt
from .options import (
    add_model_arguments,
    add_sampling_arguments,
    sampler_from,
    unicode_text,
)
from .prompt_cache_file import PromptCacheFile, continued_prompt
from .stream import generate, stream_generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of mlx_lm.generate that apply, --budget and --format."""
    add_model_arguments(parser)
    parser.set_defaults(model=None)  # a prompt cache names its own
    parser.add_argument(
        "--prompt",
        "-p",
        type=unicode_text,
        default="hello",
        help="Message to process ('-' reads from stdin).",
    )
    parser.add_argument(
        "--ignore-chat-template",
        action="store_true",
        help="Use the raw prompt without the tokenizer's chat template.",
    )
    parser.add_argument(
        "--format",
        choices=["text", "json"],
        default="text",
        help="json prints one object: the text, the counts, and what the cache kept.",
    )
    parser.add_argument(
        "--prompt-cache-file",
        help="File that cache_prompt saved; the prompt goes on from it, in the same model.",
    )
    add_sampling_arguments(parser, max_tokens=100, seed=None)


def run(args: argparse.Namespace) -> None:
    """Generates from one prompt and prints the text with its account."""
    # As in mlx-lm, a typed \\n is a line feed.
    typed = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if typed == "-" else typed
    if not text:
        raise UserError("the prompt is empty; give --prompt some text.")
    if args.prompt_cache_file is None:
        model, tokenizer = load_within(args, args.model or BUILTIN_MODEL)
        prompt, cache = text, make_prompt_cache(model)
        if not args.ignore_chat_template:
            prompt = chat_prompt(tokenizer, text, args.system_prompt)
    else:
        model, tokenizer, prompt, cache = _continue(args, text)
    options = {
        "max_tokens": args.max_tokens,
        "sampler": sampler_from(args, model),
        "prefill_step_size": args.prefill_step_size,
        "prompt_cache": cache,
    }
    if args.format == "text":
        generate(model, tokenizer, prompt, verbose=True, **options)
    else:
        _print_json(list(stream_generate(model, tokenizer, prompt, **options)), cache)


def _continue(args, text):
    """Model, tokenizer, prompt and cache where --prompt-cache-file holds the beginning."""
    given = {name: getattr(args, name) for name in ("budget", "max_loss", "system_prompt")}
    for name, value in given.items():
        if value is not None:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag}: the prompt of --prompt-cache-file has its own; leave it out.")
    saved = PromptCacheFile(args.prompt_cache_file)
    if args.model is not None:
        saved.check_model(args.model)
    model, tokenizer = load(
        saved.model, tokenizer_config=saved.tokenizer_config, adapter_path=args.adapter_path
    )
    saved.check_fits(model)
    prompt = continued_prompt(tokenizer, text, raw=args.ignore_chat_template)
    return model, tokenizer, prompt, saved.caches


def _print_json(pieces, cache):
    last = pieces[-1]
    record = {
        "text": "".join(piece.text for piece in pieces),
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
        "cache": account(cache).to_json(),
    }
    print(json.dumps(record))  # ASCII: no character that steers a terminal
