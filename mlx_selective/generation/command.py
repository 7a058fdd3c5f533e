"""``mlx-selective generate``."""

import argparse
import json
import sys

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
from .stream import generate, stream_generate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of mlx_lm.generate that apply, --budget and --format."""
    add_model_arguments(parser)
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
    add_sampling_arguments(parser, max_tokens=100, seed=None)


def run(args: argparse.Namespace) -> None:
    """Generates from one prompt and prints the text with its account."""
    # As in mlx-lm, a typed \\n is a line feed.
    typed = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if typed == "-" else typed
    if not text:
        raise UserError("the prompt is empty; give --prompt some text.")
    model, tokenizer = load(args.model, args.budget, adapter_path=args.adapter_path)
    prompt = text
    if not args.ignore_chat_template:
        prompt = chat_prompt(tokenizer, text, args.system_prompt)
    options = {
        "max_tokens": args.max_tokens,
        "sampler": sampler_from(args, model),
        "prefill_step_size": args.prefill_step_size,
        "prompt_cache": make_prompt_cache(model),
    }
    if args.format == "text":
        generate(model, tokenizer, prompt, verbose=True, **options)
        return
    pieces = list(stream_generate(model, tokenizer, prompt, **options))
    last = pieces[-1]
    record = {
        "text": "".join(piece.text for piece in pieces),
        "prompt_tokens": last.prompt_tokens,
        "generation_tokens": last.generation_tokens,
        "generation_tps": last.generation_tps,
        "peak_memory": last.peak_memory,
        "cache": account(options["prompt_cache"]).to_json(),
    }
    print(json.dumps(record))  # ASCII: no character that steers a terminal
