"""The terminal around a chat session."""

import sys
from collections.abc import Callable

from ..errors import UserError
from ..output import safe_text
from .interrupts import InterruptFlag
from .session import ChatSession

HELP = """\
/reset   start over with an empty cache
/stats   what the cache holds, and how fast the last answer was
/exit    leave (also Ctrl-D)
/help    this list
Ctrl-C stops an answer; the conversation goes on."""


class Chat:
    """Reads messages, prints answers.

    Args:
        session: the conversation.
        interactive: a person types at a terminal; otherwise messages are lines of the input,
            answers go to the output, everything else to the error stream, and Ctrl-C leaves.
        context: tokens the model was trained to read, or None if unknown.
    """

    def __init__(self, session: ChatSession, *, interactive: bool, context: int | None = None):
        self.session = session
        self.interactive = interactive
        self.context = context
        self.commands: dict[str, Callable[[], None]] = {
            "/reset": self._reset,
            "/stats": self._stats,
            "/help": lambda: self._tell(HELP),
        }

    def run(self) -> None:
        """Until /exit or the end of the input."""
        while True:
            try:
                text = self._read()
                if text == "/exit":
                    break
                if text.startswith("/"):
                    self._command(text)
                elif text:
                    self._answer(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self._tell("\n(/exit or Ctrl-D leaves)")
            except UserError as error:
                if not self.interactive:
                    raise
                self._tell(f"({error})")
        if self.interactive:
            print()

    def _read(self) -> str:
        return input(">> " if self.interactive else "").strip()

    def _answer(self, text: str) -> None:
        overflowed, response = self._overflows(), None
        with InterruptFlag() as interrupt:
            for response in self.session.answer(text, stop=lambda: interrupt.raised):
                print(safe_text(response.text), end="", flush=True)
        print(flush=True)
        if interrupt.raised:
            if not self.interactive:
                raise KeyboardInterrupt
            self._tell("(stopped)")
        if self.interactive and response is not None:
            self._tell(self._figures())
        if self._overflows() and not overflowed:
            self._tell(
                f"(the conversation is longer than the {self.context} tokens this model was "
                "trained to read; /reset starts over)"
            )

    def _overflows(self) -> bool:
        return self.context is not None and self.session.account().tokens > self.context

    def _figures(self) -> str:
        last, held = self.session.last, self.session.account()
        return (
            f"[{last.generation_tokens} tokens · {last.generation_tps:.1f} tok/s · "
            f"kept {held.kept_text} of {held.tokens} · "
            f"{held.bytes / 1e6:.2f} MB, full {held.full_bytes / 1e6:.2f} MB]"
        )

    def _reset(self) -> None:
        self.session.reset()
        self._tell("(a new conversation)")

    def _stats(self) -> None:
        account, last = self.session.account(), self.session.last
        attention = getattr(self.session.model, "attention", None)
        self._tell(f"attention   {attention.kind if attention else 'as in mlx-lm'}")
        self._tell(f"budget      {account.budget_text or 'none: every key is kept'}")
        self._tell(f"cache       {account}")
        if last is not None:
            self._tell(f"prompt      {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tok/s")
            self._tell(
                f"answer      {last.generation_tokens} tokens, {last.generation_tps:.1f} tok/s"
            )
            self._tell(f"peak memory {last.peak_memory:.3f} GB")

    def _command(self, text: str) -> None:
        if text in self.commands:
            self.commands[text]()
        else:
            self._tell(f"{text.split()[0]} is not a command.\n{HELP}")

    def _tell(self, text: str) -> None:
        print(safe_text(text), file=sys.stdout if self.interactive else sys.stderr, flush=True)
