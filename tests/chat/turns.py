"""Turns of a conversation for the chat's tests: played in any way, and played again by hand."""

import itertools

import mlx.core as mx
import numpy as np

from mlx_selective import make_prompt_cache
from mlx_selective.chat.session import ChatSession

BUDGET = 16
#: Small, so that a message takes several chunks.
STEP = 7
LONG_MESSAGE = "Tell me a story about a dragon who lost his shoes in the deep wood by the sea."


class Recorder:
    """A model that notes which tokens each call reads, and may fail at one of them."""

    def __init__(self, model):
        self._model = model
        self.calls = []
        self.fail_at = None

    def __call__(self, tokens, cache=None):
        if len(self.calls) == self.fail_at:
            raise RuntimeError("no memory")
        self.calls.append(tokens[0])
        return self._model(tokens, cache=cache)

    def __getattr__(self, name):
        return getattr(self._model, name)


def new_session(model, tokenizer) -> ChatSession:
    """A session whose model records its calls and whose answers never end by themselves."""
    return ChatSession(
        Recorder(model),
        tokenizer,
        sampler=ending_after(10**6, tokenizer),
        max_tokens=13,
        prefill_step_size=STEP,
    )


def ending_after(count: int, tokenizer):
    """A sampler: greedy but for the end token, which comes after count tokens."""
    (end,) = tokenizer.eos_token_ids
    numbers = itertools.count()

    def sampler(logprobs):
        if next(numbers) == count:
            return mx.array([end])
        return mx.argmax(mx.where(mx.arange(logprobs.shape[-1]) == end, -mx.inf, logprobs), axis=-1)

    return sampler


def stop_at(count: int):
    """A stop() that says True when it is asked for the count-th time."""
    asked = itertools.count(1)
    return lambda: next(asked) >= count


def checks_before_the_answer(tokens: list[int]) -> int:
    """How often stop() is asked until the first token of the answer is out."""
    chunks = -(-(len(tokens) - 1) // STEP)
    return 1 + chunks + 1


def take(session, text: str, ending: str) -> tuple[list[int], list[int]]:
    """Plays one turn that ends in the given way; returns its new tokens and its answer's."""
    prompt = session.conversation.tokens_for(text)
    session.sampler = ending_after(5 if ending == "end token" else 10**6, session.tokenizer)
    if ending == "closed":
        responses = session.answer(text)
        said = [next(responses).token for _ in range(4)]
        responses.close()
    elif ending.startswith("stop"):
        k = int(ending.split()[1])
        stop = stop_at(checks_before_the_answer(prompt) + k)
        said = [response.token for response in session.answer(text, stop)]
        assert len(said) == k
    else:
        said = [response.token for response in session.answer(text)]
        assert session.last.finish_reason == ("stop" if ending == "end token" else "length")
    return prompt, said


def replay(model, turns):
    """Fresh caches that have read the same turns, chunk by chunk and then token by token."""
    caches = make_prompt_cache(model)
    for prompt, said in turns:
        *context, last = prompt
        chunks = [context[i : i + STEP] for i in range(0, len(context), STEP)]
        for chunk in [*chunks, [last], *([token] for token in said)]:
            model(mx.array([chunk]), cache=caches)
    return caches


def content(cache) -> list[np.ndarray]:
    """Positions, F, keys and values of what one layer keeps, in order of position."""
    positions = np.array(cache.positions[0])
    slots = [slot for slot in np.argsort(positions, kind="stable") if positions[slot] >= 0]
    assert len(slots) == cache.size()
    arrays = (cache.positions, cache.F, cache.keys.swapaxes(1, 2), cache.values.swapaxes(1, 2))
    return [np.array(array)[0, slots] for array in arrays]


def assert_same_caches(caches, expected):
    assert {cache.offset for cache in caches} == {expected[0].offset}
    for cache, other in zip(caches, expected, strict=True):
        for found, wanted in zip(content(cache), content(other), strict=True):
            np.testing.assert_array_equal(found, wanted)
