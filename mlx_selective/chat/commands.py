"""What a person can ask of the chat itself: lines that begin with a slash."""

import argparse
from collections.abc import Callable
from pathlib import Path

from ..budget.flags import Memory, budgets_of, keys_or_memory
from ..budget.measure import check_prunable
from ..errors import UserError
from ..generation.options import between
from .saved_session import last_session, load_session, save_session
from .session import ChatSession

HELP = """\
/retry         answer the last message again
/undo          take the last message and its answer back
/system TEXT   start over under this system prompt (without TEXT: none)
/temp 0.7      the sampling temperature of the next answers
/budget 64     keys a layer keeps from now on, or memory such as 2MB
/stats         what the cache holds, and how fast the last answer was
/save FILE     the conversation and its cache, in a file
/load FILE     go on with a saved one (without FILE: the last one at a terminal)
/reset         start over with an empty cache
/help          this list
/exit          leave (also Ctrl-D)
Ctrl-C stops an answer; the conversation goes on."""

#: what a person sees at the start
HINT = """\
/retry /undo /system /temp /budget /stats /save /load /reset /exit: /help explains.
Ctrl-C stops an answer, Ctrl-D leaves."""


class Commands:
    """The commands of one chat.

    Args:
        session: what they change.
        sampler: makes a sampler of a temperature.
        tell: prints what the chat says.
        answer: prints the answer to a message.
    """

    def __init__(
        self,
        session: ChatSession,
        sampler: Callable[[float], Callable],
        *,
        tell: Callable[[str], None],
        answer: Callable[[str], None],
    ):
        self._session, self._sampler = session, sampler
        self._tell, self._answer = tell, answer
        self._known: dict[str, Callable[[str], None]] = {
            "/retry": self._retry,
            "/undo": self._undo,
            "/system": self._system,
            "/temp": self._temp,
            "/budget": self._budget,
            "/stats": self._stats,
            "/save": self._save,
            "/load": self._load,
            "/reset": self._reset,
            "/help": lambda text: tell(HELP),
        }

    def run(self, line: str) -> None:
        """Does what a line asks for.

        Raises:
            UserError: if what follows the command is not what it takes.
        """
        name, _, text = line.partition(" ")
        if name in self._known:
            self._known[name](text.strip())
        else:
            self._tell(f"{name} is not a command.\n{HELP}")

    def _retry(self, text: str) -> None:
        message = self._session.undo()
        if message is None:
            raise UserError("there is no answer to try again.")
        self._answer(message)

    def _undo(self, text: str) -> None:
        if self._session.undo() is None:
            raise UserError("there is nothing to take back; only the last message can be.")
        self._tell("(the last message and its answer are taken back)")

    def _system(self, text: str) -> None:
        session = self._session
        session.system_prompt = text or None
        session.reset()
        self._tell("(a new conversation" + (", under this system prompt)" if text else ")"))

    def _temp(self, text: str) -> None:
        value = _parsed("/temp", between(float, 0), text)
        self._session.sampler = self._sampler(value)
        self._tell(f"(temperature {value:g})")

    def _budget(self, text: str) -> None:
        session = self._session
        asked = _parsed("/budget", keys_or_memory, text)
        attention = check_prunable(session.model)
        budgets = budgets_of(asked, session.model) if isinstance(asked, Memory) else asked
        session.set_budget(attention.with_budget(budgets))
        self._tell(f"({session.account().budget_text} keys a layer from the next token on)")

    def _save(self, text: str) -> None:
        if not text:
            raise UserError("/save takes the name of a file.")
        self._tell(f"(saved in {save_session(self._session, _path(text))})")

    def _load(self, text: str) -> None:
        session = self._session
        load_session(session, _path(text) if text else last_session())
        turns = len(session.conversation.messages) // 2
        self._tell(f"({turns} turn{'s' * (turns > 1)}, {session.account()})")

    def _reset(self, text: str) -> None:
        self._session.reset()
        self._tell("(a new conversation)")

    def _stats(self, text: str) -> None:
        session, tell = self._session, self._tell
        account, last = session.account(), session.last
        attention = getattr(session.model, "attention", None)
        tell(f"attention   {attention.kind if attention else 'as in mlx-lm'}")
        tell(f"budget      {account.budget_text or 'none: every key is kept'}")
        tell(f"cache       {account}")
        if last is not None:
            tell(f"prompt      {last.prompt_tokens} tokens, {last.prompt_tps:.1f} tok/s")
            tell(f"answer      {last.generation_tokens} tokens, {last.generation_tps:.1f} tok/s")
            tell(f"peak memory {last.peak_memory:.3f} GB")


def _path(text: str) -> Path:
    return Path(text).expanduser()


def _parsed(command: str, kind: Callable, text: str):
    """What follows a command.

    Raises:
        UserError: if it is not of that kind.
    """
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"{command} {error}.") from None
    except ValueError:
        raise UserError(f"{command} takes a number, got {text!r}.") from None
