"""A chat without a terminal: the conversation, the caches, and the answers as they come."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..attention import AttentionMethod
from ..cache import CacheAccount, account, make_prompt_cache
from ..generation import PREFILL_STEP_SIZE, stream_generate
from .conversation import Conversation


class _Cancelled(Exception):
    """Raised between two chunks of a prompt, where every layer has seen the same tokens."""


@dataclass(frozen=True)
class _Turn:
    """What brings back the session of before a turn.

    Args:
        text: the user's message.
        caches: of before, or None where the caches can be trimmed.
        tokens: that the caches had read.
        conversation: as it was.
        last: the response of the answer before.
    """

    text: str
    caches: list[Any] | None
    tokens: int
    conversation: Conversation
    last: GenerationResponse | None


class ChatSession:
    """One conversation with one model; turns are read into the same caches.

    Args:
        model: a loaded model; its caches have the budget it was loaded with.
        tokenizer: its tokenizer.
        sampler: mlx-lm sampler, or None for greedy.
        system_prompt: for the chat template.
        max_tokens: most tokens of one answer.
        prefill_step_size: tokens of a message that are read at once.

    Attributes:
        last: mlx-lm's last response of the last answer, for its figures, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: TokenizerWrapper,
        *,
        sampler: Callable[[mx.array], mx.array] | None = None,
        system_prompt: str | None = None,
        max_tokens: int = 256,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.sampler = sampler
        self.max_tokens = max_tokens
        self.prefill_step_size = prefill_step_size
        self.system_prompt = system_prompt
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation and frees its caches."""
        self.conversation = Conversation(self.tokenizer, self.system_prompt)
        self.prompt_cache: list[Any] = make_prompt_cache(self.model)
        self.last: GenerationResponse | None = None
        self._turn: _Turn | None = None

    def set_budget(self, attention: AttentionMethod) -> None:
        """Holds the caches, and those of later conversations, to other budgets.

        Keys beyond them leave after the next token; what has left does not come back.

        Args:
            attention: the model's attention under the budgets.

        Raises:
            UserError: if it does not fit the model.
        """
        self.model.exchange_attention(attention)
        before = self._turn.caches if self._turn else None
        for caches in (self.prompt_cache, *([before] if before else [])):
            for cache, fresh in zip(caches, make_prompt_cache(self.model), strict=True):
                cache.budget = fresh.budget

    def take_up(
        self,
        caches: list[Any],
        messages: list[dict[str, str]],
        ended: bool,
        system_prompt: str | None,
    ) -> None:
        """Goes on with a conversation from elsewhere.

        Args:
            caches: one a layer, that have read it.
            messages: what was said.
            ended: whether the model ended the last answer itself.
            system_prompt: that it began with.
        """
        self.system_prompt = system_prompt
        self.reset()
        self.conversation = Conversation(self.tokenizer, system_prompt, messages, ended)
        self.prompt_cache = caches

    def undo(self) -> str | None:
        """Takes back the last turn: the caches and the conversation are those of before it.

        The turn before that cannot be taken back afterwards: a pruned cache cannot return what it
        gave up, so that one copy of it is kept, not one for each turn.

        Returns:
            The message of the turn, or None if there is none to take back.
        """
        turn, self._turn = self._turn, None
        if turn is None:
            return None
        if turn.caches is None:
            trim_prompt_cache(self.prompt_cache, self.account().tokens - turn.tokens)
        else:
            self.prompt_cache = turn.caches
        self.conversation, self.last = turn.conversation, turn.last
        return turn.text

    def account(self) -> CacheAccount:
        """What the caches hold now."""
        return account(self.prompt_cache)

    def answer(
        self, text: str, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[GenerationResponse]:
        """Answers a message, piece by piece.

        Args:
            text: the user's message.
            stop: asked after each chunk of the message and each token; when it says True, the
                answer ends there, as it does when the iterator is closed. Stopped while the
                message is read, the turn has not happened.

        Yields:
            mlx-lm's responses.
        """
        tokens = self.conversation.tokens_for(text)
        before: list[Any] | None = copy.deepcopy(self.prompt_cache)
        turn = self._turn_before(text, before)

        def check(*progress):
            if stop():
                raise _Cancelled

        said, ended = "", False
        responses = stream_generate(
            self.model,
            self.tokenizer,
            tokens,
            self.max_tokens,
            prompt_cache=self.prompt_cache,
            prefill_step_size=self.prefill_step_size,
            sampler=self.sampler,
            prompt_progress_callback=check,
        )
        try:
            for response in responses:
                # The message is read: the turn has happened.
                before, self._turn = None, turn
                said += response.text
                ended = response.finish_reason == "stop"
                self.last = response
                yield response
                # The cache holds every token that was yielded, this one included.
                if stop():
                    break
        except _Cancelled:
            pass
        finally:
            # Also when whoever asked stops listening, or the message cannot be read.
            responses.close()
            if before is None:
                self.conversation.add_turn(text, said, ended)
            else:
                self.prompt_cache = before

    def _turn_before(self, text: str, caches: list[Any]) -> _Turn:
        # Caches that can be trimmed need no copy, which would only hold memory.
        copied = None if can_trim_prompt_cache(self.prompt_cache) else caches
        said = replace(self.conversation, messages=list(self.conversation.messages))
        return _Turn(text, copied, self.account().tokens, said, self.last)
