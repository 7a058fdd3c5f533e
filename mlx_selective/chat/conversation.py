"""A conversation as tokens: each turn adds only what the cache has not seen."""

from dataclasses import dataclass, field

from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..generation.options import render_chat

_ANSWER = "ANSWERSTANDSHERE"


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
    """

    tokenizer: TokenizerWrapper
    system_prompt: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    _answer_ended: bool = True

    def tokens_for(self, text: str) -> list[int]:
        """The tokens to feed for a user's message, given what the cache holds already.

        Raises:
            UserError: if the chat template refuses the messages.
        """
        if not self.tokenizer.has_chat_template:
            return self._plain_tokens(text)
        user = {"role": "user", "content": text}
        if not self.messages:
            return list(render_chat(self.tokenizer, [*self._system(), user]))
        rendered = render_chat(
            self.tokenizer,
            [
                *self._system(),
                {"role": "user", "content": "-"},
                {"role": "assistant", "content": _ANSWER},
                user,
            ],
            tokenize=False,
        )
        return self._after_answer(rendered.split(_ANSWER, 1)[1])

    def add_turn(self, text: str, answer: str, ended: bool) -> None:
        """Records a message and its answer.

        Args:
            ended: whether the model ended the answer itself, so that the end token is cached.
        """
        self.messages.append({"role": "user", "content": text})
        self.messages.append({"role": "assistant", "content": answer})
        self._answer_ended = ended

    def _system(self):
        if self.system_prompt is None:
            return []
        return [{"role": "system", "content": self.system_prompt}]

    def _after_answer(self, text):
        """Encodes what the template puts after an answer, from its end token on."""
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        for index, token in enumerate(tokens):
            if token in self.tokenizer.eos_token_ids:
                # Before the end token there is nothing but what a tokenizer puts at the start
                # of a text; an answer that ended has the end token in the cache.
                return tokens[index + 1 :] if self._answer_ended else tokens[index:]
        return tokens

    def _plain_tokens(self, text):
        """Without a template: the texts, one after another."""
        if self.messages:
            return self.tokenizer.encode("\n" + text, add_special_tokens=False)
        return self.tokenizer.encode(text)
