"""The terminal around a chat session."""

import shutil
import sys
from collections.abc import Callable

from ..errors import UserError
from ..interrupts import InterruptFlag
from ..output import safe_text, wrapped
from .commands import Commands
from .saved_session import last_session, save_session
from .session import ChatSession


class Chat:
    """Reads messages, prints answers.

    Args:
        session: the conversation.
        interactive: a person types at a terminal; otherwise messages are lines of the input,
            answers go to the output, everything else to the error stream, and Ctrl-C leaves.
        sampler: makes a sampler of a temperature.
        context: tokens the model was trained to read, or None if unknown.
    """

    def __init__(
        self,
        session: ChatSession,
        *,
        interactive: bool,
        sampler: Callable[[float], Callable],
        context: int | None = None,
    ):
        self.session = session
        self.interactive = interactive
        self.context = context
        self.commands = Commands(session, sampler, tell=self.tell, answer=self.answer)

    def run(self) -> None:
        """Until /exit or the end of the input."""
        while True:
            try:
                text = self._read()
                if text == "/exit":
                    break
                if text.startswith("/"):
                    self.commands.run(text)
                elif text:
                    self.answer(text)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                self.tell("\n(/exit or Ctrl-D leaves)")
            except UserError as error:
                if not self.interactive:
                    raise
                self.tell(f"({error})")
        if self.interactive:
            print()

    def _read(self) -> str:
        return input(">> " if self.interactive else "").strip()

    def answer(self, text: str) -> None:
        """Prints the answer to a message, and its figures."""
        overflowed, response = self._overflows(), None
        with InterruptFlag() as interrupt:
            for response in self.session.answer(text, stop=lambda: interrupt.raised):
                print(safe_text(response.text), end="", flush=True)
        print(flush=True)
        if interrupt.raised:
            if not self.interactive:
                raise KeyboardInterrupt
            self.tell("(stopped)")
        if self.interactive and response is not None:
            self.tell(self._figures())
            self._keep()
        if self._overflows() and not overflowed:
            self.tell(
                f"(the conversation is longer than the {self.context} tokens this model was "
                "trained to read; /reset starts over)"
            )

    def _keep(self) -> None:
        """So that /load brings back a conversation whose terminal went away."""
        try:
            save_session(self.session, last_session())
        except UserError as error:
            self.tell(f"(not kept for /load: {error})")

    def _overflows(self) -> bool:
        return self.context is not None and self.session.account().tokens > self.context

    def _figures(self) -> str:
        last, held = self.session.last, self.session.account()
        return (
            f"[{last.generation_tokens} tokens · {last.generation_tps:.1f} tok/s · "
            f"kept {held.kept_text} of {held.tokens} · "
            f"{held.bytes / 1e6:.2f} MB, full {held.full_bytes / 1e6:.2f} MB]"
        )

    def tell(self, text: str) -> None:
        """Prints what the chat itself says, on the error stream where input is piped."""
        text = safe_text(text)
        if self.interactive:
            print(wrapped(text, shutil.get_terminal_size().columns), flush=True)
        else:
            print(text, file=sys.stderr, flush=True)
