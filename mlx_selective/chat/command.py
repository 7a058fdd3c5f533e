"""``mlx-selective chat``, and ``python chat.py``."""

import argparse
import shutil
import sys

from ..budget.flags import load_within
from ..builtin import BUILTIN_MODEL
from ..generation.options import (
    add_model_arguments,
    add_sampling_arguments,
    sampler_from,
)
from ..output import safe_text, wrapped
from .commands import HINT
from .loop import Chat
from .session import ChatSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of mlx_lm.chat that apply, and --budget."""
    add_model_arguments(parser)
    add_sampling_arguments(parser, max_tokens=256, seed=0)


def run(args: argparse.Namespace) -> None:
    """Loads the model and talks until the input ends."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        import readline  # noqa: F401  gives input() line editing and history
    model, tokenizer = load_within(args, args.model)
    session = ChatSession(
        model,
        tokenizer,
        sampler=sampler_from(args, model),
        system_prompt=args.system_prompt,
        max_tokens=args.max_tokens,
        prefill_step_size=args.prefill_step_size,
    )
    if interactive:
        attention = getattr(model, "attention", None)
        kind = f"{attention.kind} attention" if attention else "attention as in mlx-lm"
        budget = session.account().budget_text
        name = "built-in model" if args.model == str(BUILTIN_MODEL) else args.model
        held = f"{budget} keys a layer" if budget else "full cache"
        columns = shutil.get_terminal_size().columns
        print(wrapped(safe_text(f"{name}: {kind}, {held}\n{HINT}"), columns))
    if not tokenizer.has_chat_template:
        print("(this model has no chat template; it continues plain text)", file=sys.stderr)
    context = getattr(model.args, "max_position_embeddings", None)

    def sampler(temperature: float):
        args.temp, args.seed = temperature, None  # the random numbers go on
        return sampler_from(args, model)

    Chat(session, interactive=interactive, sampler=sampler, context=context).run()
