"""Turns on one cache: nothing is read twice, no layer is ahead, and a stop leaves no trace."""

import copy
import gc

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from turns import (
    BUDGET,
    LONG_MESSAGE,
    STEP,
    assert_same_caches,
    checks_before_the_answer,
    new_session,
    replay,
    stop_at,
    take,
)

from mlx_selective import PrunedKVCache, graft

ENDINGS = ["max tokens", "end token", "closed", *(f"stop {k}" for k in range(1, 13))]


@pytest.mark.parametrize("ending", ENDINGS)
def test_caches_after_any_end_of_an_answer_are_those_of_a_replay(session, model, ending):
    turns = [take(session, "Tell me a story", ending)]

    assert_same_caches(session.prompt_cache, replay(model, turns))
    assert session.conversation.messages[0]["content"] == "Tell me a story"
    # Ended or not, the next turn goes on from there.
    turns.append(take(session, LONG_MESSAGE, "stop 3"))
    assert_same_caches(session.prompt_cache, replay(model, turns))


def test_caches_of_the_built_in_model_are_those_of_a_replay(builtin_session, builtin):
    turns = [take(builtin_session, "Hello", "stop 3"), take(builtin_session, "Why?", "end token")]

    assert_same_caches(builtin_session.prompt_cache, replay(builtin[0], turns))


@pytest.mark.parametrize("ending", ["max tokens", "end token", "stop 2"])
def test_a_turn_reads_only_what_is_new(session, builtin, ending):
    turns = [take(session, text, ending) for text in ("Hello", LONG_MESSAGE, "Why?")]

    read = [token for call in session.model.calls for token in call.tolist()]
    assert read == [token for prompt, said in turns for token in [*prompt, *said]]
    # The end token of an answer is read once: by its own turn, or by the next one.
    end, begin = builtin[1].eos_token_id, builtin[1].bos_token_id
    assert (read.count(begin), read.count(end)) == (1, 6 if ending == "end token" else 5)


@pytest.mark.parametrize("moment", ["at once", "after a chunk", "when the first token is known"])
@pytest.mark.parametrize("earlier", [0, 1], ids=["first turn", "second turn"])
def test_a_turn_cancelled_while_its_message_is_read_never_happened(session, moment, earlier):
    for _ in range(earlier):
        take(session, "Hello", "max tokens")
    before, messages = copy.deepcopy(session.prompt_cache), list(session.conversation.messages)
    last = session.last
    tokens = session.conversation.tokens_for(LONG_MESSAGE)
    assert len(tokens) > 3 * STEP
    count = {"at once": 1, "after a chunk": 3}.get(moment, checks_before_the_answer(tokens))

    assert list(session.answer(LONG_MESSAGE, stop_at(count))) == []

    assert (session.conversation.messages, session.last) == (messages, last)
    assert session.conversation.tokens_for(LONG_MESSAGE) == tokens
    if earlier:
        assert_same_caches(session.prompt_cache, before)
    else:
        assert all(cache.empty() and cache.offset == 0 for cache in session.prompt_cache)


def test_the_conversation_after_a_cancelled_turn_is_the_one_without_it(session):
    take(session, "Hello", "stop 2")
    list(session.answer(LONG_MESSAGE, stop_at(3)))
    after = [take(session, "Why?", "max tokens"), take(session, "Who?", "stop 4")]

    session.reset()
    take(session, "Hello", "stop 2")
    assert after == [take(session, "Why?", "max tokens"), take(session, "Who?", "stop 4")]


def test_a_message_that_cannot_be_read_leaves_the_session_as_it_was(session):
    take(session, "Hello", "max tokens")
    before, messages = copy.deepcopy(session.prompt_cache), list(session.conversation.messages)
    session.model.fail_at = len(session.model.calls) + 2

    with pytest.raises(RuntimeError, match="no memory"):
        list(session.answer(LONG_MESSAGE))

    assert session.conversation.messages == messages
    assert_same_caches(session.prompt_cache, before)


def active_memory() -> int:
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()


def test_an_answer_holds_its_caches_and_those_of_before_the_turn(session):
    """Which undo brings back; where caches can be trimmed, no copy is held."""

    def caches():
        gc.collect()
        return sum(isinstance(thing, (PrunedKVCache, KVCache)) for thing in gc.get_objects())

    before = caches()
    for _ in range(2):
        during = [caches() for _ in session.answer("Hello")]
        assert set(during) == {before + 3}

    softmax = graft(llama.Model(session.model.args), {"kind": "softmax"})
    session = new_session(softmax, session.tokenizer)
    before = caches()
    for _ in range(2):
        assert {caches() for _ in session.answer("Hello")} == {before}


def test_reset_forgets_and_frees(builtin_session):
    session = builtin_session
    empty = active_memory()
    first = take(session, "Hello", "stop 5")
    full = active_memory()

    session.reset()
    session.model.calls.clear()

    assert all(cache.empty() for cache in session.prompt_cache)
    assert session.account().tokens == session.account().bytes == 0
    assert (session.conversation.messages, session.last) == ([], None)
    # Scalars and the like may stay; the caches may not.
    caches = 100_000
    assert full - empty > caches
    assert active_memory() - empty < caches / 4
    assert take(session, "Hello", "stop 5") == first


@pytest.mark.slow
def test_a_long_chat_stays_at_the_budget(builtin_session):
    session = builtin_session
    session.max_tokens = 36
    sizes, bytes_held, memory = [], [], []
    while session.account().tokens < 400:
        for number, _ in enumerate(session.answer("Go on")):
            if number == 20:
                memory.append(active_memory())
        sizes += [cache.size() for cache in session.prompt_cache]
        bytes_held.append(session.account().bytes)
        session.model.calls.clear()

    assert set(sizes) == {BUDGET}
    assert len(set(bytes_held)) == 1
    assert len(memory) > 5 and max(memory) - memory[0] < 25_000
    account = session.account()
    assert (account.kept, account.budget) == (BUDGET, BUDGET)
    assert account.bytes < account.full_bytes / 10
