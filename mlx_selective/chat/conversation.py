"""A conversation as tokens: each turn adds only what the cache has not seen."""

from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import UserError
from ..generation.chat_template import render_chat

#: Stand-ins for messages, to find their places in what a template renders.
_ANSWER, _QUESTION = "ANSWERSTANDSHERE", "QUESTIONSTANDSHERE"


@dataclass
class Conversation:
    """Which messages were said, and the tokens that a new one adds to the cache.

    The text between two turns comes from the chat template itself: it is rendered around a
    stand-in for the answer, and what follows the stand-in is what the next turn must add.

    Args:
        tokenizer: of the model.
        system_prompt: goes before the first message, if the template has a place for it.

    Attributes:
        messages: what was said, as dicts of role and content; an interrupted answer counts as
            far as it came.
        answer_ended: whether the model ended the last answer itself.
    """

    tokenizer: TokenizerWrapper
    system_prompt: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    answer_ended: bool = True

    def tokens_for(self, text: str) -> list[int]:
        """The tokens to feed for a user's message, given what the cache holds already.

        Raises:
            UserError: if the chat template refuses the messages.
        """
        if not self.tokenizer.has_chat_template:
            return self._plain_tokens(text)
        if not self.messages:
            user = {"role": "user", "content": text}
            return list(render_chat(self.tokenizer, [*self._system(), user]))
        tokens = self.tokenizer.encode(self._after_answer(text), add_special_tokens=False)
        gap = self._after_answer(_QUESTION).split(_QUESTION, 1)[0]
        if self._find_end(self.tokenizer.encode(gap, add_special_tokens=False)) is None:
            return tokens  # this template ends no answer
        end = self._find_end(tokens)
        # Before the end token there is nothing but what a tokenizer puts at the start of a
        # text; an answer that ended has the end token in the cache.
        return tokens[end + 1 :] if self.answer_ended else tokens[end:]

    def add_turn(self, text: str, answer: str, ended: bool) -> None:
        """Records a message and its answer.

        Args:
            ended: whether the model ended the answer itself, so that the end token is cached.
        """
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": answer})
        self.answer_ended = ended

    def _system(self):
        if self.system_prompt is None:
            return []
        return [{"role": "system", "content": self.system_prompt}]

    def _after_answer(self, text):
        """What the template puts from the end of an answer to the beginning of the next."""
        messages = [
            *self._system(),
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": text},
        ]
        rendered = render_chat(self.tokenizer, messages, tokenize=False)
        if _ANSWER not in rendered:
            raise UserError("the chat template changes answers; a second turn cannot follow.")
        return rendered.split(_ANSWER, 1)[1]

    def _find_end(self, tokens):
        """Where the first end token stands, or None."""
        ends = self.tokenizer.eos_token_ids
        return next((i for i, token in enumerate(tokens) if token in ends), None)

    def _plain_tokens(self, text):
        """Without a template: the texts, one after another."""
        if self.messages:
            return self.tokenizer.encode("\n" + text, add_special_tokens=False)
        return self.tokenizer.encode(text)
