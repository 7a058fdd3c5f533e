"""mlx-lm's BatchGenerator, as its server and batch_generate run it, on grafted models.

Every prompt gets the tokens that it gets alone. Under a budget that holds where it is read in the
same chunks: BatchGenerator reads up to prefill_step_size tokens of each prompt and keeps the last
one for the first step, and so does generate_step.
"""

import inspect

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from layer import kept_in_row
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import make_prompt_cache
from tiny import grafted, tokens

from mlx_selective import PrunedKVCache, load
from mlx_selective.builtin import BUILTIN_MODEL

ATTENTIONS = {
    "selective": {"kind": "selective"},
    "budget": {"kind": "selective", "budget": 8},
    "budgets": {"kind": "selective", "budget": [3, None, 12]},
    "mixed": [{"kind": "selective", "budget": 6}, {"kind": "softmax"}, {"kind": "selective"}],
    "ssa": {"kind": "ssa"},
    "stick_breaking": {"kind": "stick_breaking", "attend_current": True},
}
LENGTHS, MAX_TOKENS, STEP = [12, 3, 1, 19, 7, 26, 2], [9, 4, 14, 6, 1, 11, 8], 5


def prompts():
    return [tokens(1, n, seed=n)[0].tolist() for n in LENGTHS]


def script(prompt):
    """A sampler that says given tokens, whatever the model would have said.

    Left alone, a model of random weights says one token over and over; then keys have the same F
    but for rounding, and which of them goes depends on how the processor adds.
    """
    said = iter(tokens(1, 40, seed=900 + len(prompt))[0].tolist())
    return lambda logprobs: mx.array([next(said)], mx.uint32)


class Answer:
    """The tokens after a prompt and their log probabilities; equal up to rounding."""

    def __init__(self):
        self.tokens, self.logprobs = [], []

    def add(self, token, logprobs):
        self.tokens.append(token)
        self.logprobs.append(logprobs)

    def __eq__(self, other):
        far = mx.abs(mx.stack(self.logprobs) - mx.stack(other.logprobs)).max()
        return self.tokens == other.tokens and far.item() < 1e-4


def alone(model, prompt, count, cache=None):
    """The answer to one prompt."""
    cache = make_prompt_cache(model) if cache is None else cache
    answer = Answer()
    for token, logprobs in generate_step(
        mx.array(prompt),
        model,
        max_tokens=count,
        prompt_cache=cache,
        prefill_step_size=STEP,
        sampler=script(prompt),
    ):
        answer.add(int(token), logprobs)
    return answer


def together(model, prompts, counts, caches=None, **options):
    """The answer to each prompt, and its caches at the end."""
    generator = BatchGenerator(model, prefill_step_size=STEP, **options)
    uids = generator.insert(prompts, counts, caches, samplers=list(map(script, prompts)))
    given, ended = {uid: Answer() for uid in uids}, {}
    while len(ended) < len(uids):
        for response in generator.next_generated():
            given[response.uid].add(response.token, response.logprobs)
            if response.finish_reason:
                assert response.finish_reason == "length"
                ended[response.uid] = response.prompt_cache
    generator.close()
    return [given[uid] for uid in uids], [ended[uid] for uid in uids]


@pytest.mark.parametrize(
    "family, attention",
    [
        pytest.param(
            family,
            attention,
            id=f"{family}-{name}",
            marks=pytest.mark.slow if family == "gpt_neox" else (),
        )
        for family in ("llama", "gpt2", "gpt_neox")
        for name, attention in ATTENTIONS.items()
        if (family, name) != ("gpt2", "stick_breaking")  # it has no RoPE to leave out
    ],
)
def test_every_prompt_gets_what_it_gets_alone(family, attention):
    model = grafted(family, attention)
    expected = [alone(model, p, n) for p, n in zip(prompts(), MAX_TOKENS, strict=True)]
    first = mx.stack([answer.logprobs[0] for answer in expected])
    assert mx.abs(first[1:] - first[:-1]).max(axis=-1).min().item() > 0.1  # the prompts matter
    for sizes in [(2, 2), (4, 3), (32, 8)]:
        options = dict(zip(("completion_batch_size", "prefill_batch_size"), sizes, strict=True))
        given, _ = together(model, prompts(), MAX_TOKENS, **options)
        assert given == expected, sizes


@pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS)
def test_a_conversation_goes_on_in_another_batch(attention):
    """Caches that a batch gave back go into the next one, as the server keeps them."""
    model = grafted("llama", attention)
    _, caches = together(
        model, prompts(), MAX_TOKENS, completion_batch_size=3, prefill_batch_size=3
    )
    assert all(
        layer.offset == length + count
        for cache, length, count in zip(caches, LENGTHS, MAX_TOKENS, strict=True)
        for layer in cache
    )
    turns = [tokens(1, n, seed=50 + n)[0].tolist() for n in reversed(LENGTHS)]
    expected, same = [], []
    for prompt, count, turn, given in zip(prompts(), MAX_TOKENS, turns, caches, strict=True):
        cache = make_prompt_cache(model)
        alone(model, prompt, count, cache)
        same.append(all(map(keeps_the_same, cache, given)))
        expected.append(alone(model, turn, 5, cache))
    assert sum(same) >= len(same) - 1
    given, _ = together(model, turns, [5] * len(turns), caches, completion_batch_size=4)
    for answer, other, compared in zip(given, expected, same, strict=True):
        assert answer == other or not compared


def keeps_the_same(cache, other):
    """Whether two caches of a layer keep the same keys.

    A token that is said over and over has keys whose F differ by rounding only; then the GPU's
    other sums for a batch may let another of them go. Anything else is an error here.
    """
    if not isinstance(cache, PrunedKVCache):
        return True
    (held, F, *_), (other_held, other_F, *_) = kept_in_row(cache, 0), kept_in_row(other, 0)
    differing = np.setxor1d(held, other_held)
    F_of = dict(zip([*held, *other_held], [*F, *other_F], strict=True))
    assert np.ptp([F_of[position] for position in differing] or [0]) < 1e-4
    return not differing.size


def test_budgets_hold_in_batches():
    model = grafted("llama", {"kind": "selective", "budget": [3, None, 12]})
    _, caches = together(
        model, prompts(), MAX_TOKENS, completion_batch_size=3, prefill_batch_size=3
    )
    for cache, length, count in zip(caches, LENGTHS, MAX_TOKENS, strict=True):
        seen = length + count
        assert [layer.size() for layer in cache] == [min(3, seen), seen, min(12, seen)]


# mlx_lm.batch_generate ----------------------------------------------------------------------------

TEXTS = [
    "Once upon a time, there was a little girl who had a red ball. One day",
    "Tom and his dog",
    "The",
    "Lily went to the park with her mom. They saw a pond with ducks. Lily said,",
]
COUNTS, BUDGET = [14, 6, 20, 9], 16


@pytest.fixture(scope="module")
def builtin():
    return load(BUILTIN_MODEL, budget=BUDGET)


def written_alone(builtin, ids, count, cache):
    """The tokens that mlx_lm.stream_generate gives to one prompt."""
    options = {"prompt_cache": cache, "prefill_step_size": STEP}
    responses = mlx_lm.stream_generate(*builtin, ids, max_tokens=count, **options)
    return [r.token for r in responses if r.finish_reason != "stop"]


@pytest.mark.skipif(
    "return_token_ids" not in inspect.signature(mlx_lm.batch_generate).parameters,
    reason="this mlx-lm's batch_generate does not give token ids (before 0.32)",
)
def test_batch_generate_writes_what_each_prompt_gets_alone(builtin):
    """And its caches go on: with the next message, in a batch again."""
    model, tokenizer = builtin
    caches = [make_prompt_cache(model) for _ in TEXTS]
    options = {"return_token_ids": True, "return_prompt_caches": True, "prefill_step_size": STEP}
    given, alike = None, [True] * len(TEXTS)
    for texts in (TEXTS, ["\nThen he", "!", " and so the old king went home. The", "\nBut"]):
        prompts = [tokenizer.encode(text, add_special_tokens=given is None) for text in texts]
        assert len(set(map(len, prompts))) > 2
        expected = [
            written_alone(builtin, prompt, count, cache)
            for prompt, count, cache in zip(prompts, COUNTS, caches, strict=True)
        ]
        assert list(map(len, expected)) == COUNTS  # none ends before its time
        before = given and given.caches
        given = mlx_lm.batch_generate(model, tokenizer, prompts, before, COUNTS, **options)
        assert given.texts == list(map(tokenizer.decode, given.token_ids))
        for ids, others, like in zip(given.token_ids, expected, alike, strict=True):
            assert ids == others or not like
        for cache, other in zip(given.caches, caches, strict=True):
            sizes = [(layer.size(), layer.offset) for layer in other]
            assert [(layer.size(), layer.offset) for layer in cache] == sizes
            assert sizes[0][0] == min(BUDGET, sizes[0][1])
        alike = [
            all(map(keeps_the_same, cache, other))
            for cache, other in zip(caches, given.caches, strict=True)
        ]
        assert sum(alike) >= len(alike) - 1
