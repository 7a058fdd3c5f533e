"""A chat without a terminal: the conversation, the caches, and the answers as they come."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache import CacheAccount, account, make_prompt_cache
from ..generation import PREFILL_STEP_SIZE, stream_generate
from .conversation import Conversation


class _Cancelled(Exception):
    """Raised between two chunks of a prompt, where every layer has seen the same tokens."""


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
                # The message is read: from here on a copy would only hold memory.
                before = None
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
