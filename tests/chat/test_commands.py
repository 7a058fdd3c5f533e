"""/undo, /retry, /system, /temp, /budget: the caches are those of a conversation without them."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import llama
from turns import BUDGET, LONG_MESSAGE, assert_same_caches, new_session, replay, take

from mlx_selective import graft
from mlx_selective.chat.commands import HELP
from mlx_selective.chat.loop import Chat
from mlx_selective.errors import UserError


@pytest.fixture
def chat(session, capsys):
    """A chat whose commands are lines; what it tells goes to the error stream."""
    samplers = []

    def sampler(temperature):
        samplers.append(temperature)
        return session.sampler

    made = Chat(session, interactive=False, sampler=sampler)
    made.samplers = samplers
    return made


@pytest.mark.parametrize("ending", ["max tokens", "end token", "stop 3", "closed"])
@pytest.mark.parametrize("earlier", [0, 1, 2])
def test_undo_brings_back_what_was_before(session, model, ending, earlier):
    turns = [take(session, text, "stop 5") for text in ("Hello", LONG_MESSAGE)[:earlier]]
    messages, last = list(session.conversation.messages), session.last
    take(session, "Tell me a story about a cat", ending)

    assert session.undo() == "Tell me a story about a cat"
    assert (session.conversation.messages, session.last) == (messages, last)
    if earlier:
        assert_same_caches(session.prompt_cache, replay(model, turns))
    else:
        assert session.account().tokens == 0
    assert session.undo() is None
    turns.append(take(session, "Why?", "max tokens"))
    assert_same_caches(session.prompt_cache, replay(model, turns))


def test_undo_trims_caches_that_can_be_trimmed(session):
    mx.random.seed(1)
    softmax = graft(llama.Model(session.model.args), {"kind": "softmax"})
    session = new_session(softmax, session.tokenizer)
    turns = [take(session, "Hello", "stop 4")]
    take(session, LONG_MESSAGE, "max tokens")
    assert session.undo() == LONG_MESSAGE
    turns.append(take(session, "Why?", "stop 2"))
    for cache, other in zip(session.prompt_cache, replay(softmax, turns), strict=True):
        assert cache.offset == other.offset
        read = slice(0, cache.offset)
        for found, wanted in ((cache.keys, other.keys), (cache.values, other.values)):
            np.testing.assert_allclose(found[:, :, read], wanted[:, :, read], atol=1e-6)


def test_a_cancelled_turn_is_none_that_can_be_taken_back(session):
    take(session, "Hello", "stop 2")
    list(session.answer(LONG_MESSAGE, stop=lambda: True))
    assert session.undo() == "Hello"


def test_retry_answers_again(chat, capsys):
    chat.answer("Hello")
    first = capsys.readouterr().out
    chat.commands.run("/retry")
    assert capsys.readouterr().out == first  # greedy
    assert [m["role"] for m in chat.session.conversation.messages] == ["user", "assistant"]
    chat.commands.run("/undo")
    with pytest.raises(UserError, match="no answer to try again"):
        chat.commands.run("/retry")
    with pytest.raises(UserError, match="nothing to take back"):
        chat.commands.run("/undo")


@pytest.mark.parametrize("lower", [True, False])
def test_another_budget(chat, capsys, lower):
    chat.answer(LONG_MESSAGE)
    assert set(cache.size() for cache in chat.session.prompt_cache) == {BUDGET}
    other = BUDGET // 2 if lower else 2 * BUDGET
    chat.commands.run(f"/budget {other}")
    assert f"({other} keys a layer from the next token on)" in capsys.readouterr().err
    chat.answer(LONG_MESSAGE)
    assert set(cache.size() for cache in chat.session.prompt_cache) == {other}
    chat.session.undo()
    assert set(cache.budget for cache in chat.session.prompt_cache) == {other}
    chat.commands.run("/reset")
    assert chat.session.account().budget == other
    chat.commands.run(f"/budget {BUDGET}")


def test_the_budget_as_memory(chat, capsys):
    chat.commands.run("/budget 100KB")
    chat.answer(LONG_MESSAGE)
    chat.answer(LONG_MESSAGE * 3)
    assert 90_000 < chat.session.account().bytes <= 100_000
    chat.commands.run(f"/budget {BUDGET}")


def test_system_and_temperature(chat, capsys):
    chat.answer("Hello")
    chat.commands.run("/system You are a cat.")
    session = chat.session
    assert session.account().tokens == 0 and session.conversation.messages == []
    assert session.conversation.system_prompt == "You are a cat."
    chat.commands.run("/system")
    assert session.conversation.system_prompt is None
    chat.commands.run("/temp 0.7")
    assert chat.samplers == [0.7] and "(temperature 0.7)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        ("/temp", "/temp takes a number, got ''"),
        ("/temp warm", "/temp takes a number, got 'warm'"),
        ("/temp -1", "/temp must be at least 0"),
        ("/temp nan", "/temp must be at least 0"),
        ("/budget", "/budget must be keys a layer such as 256"),
        ("/budget 1", "budget must be at least 2 keys"),
        ("/budget 10B", "take at least"),
    ],
)
def test_commands_that_cannot_be_followed(chat, line, message):
    with pytest.raises(UserError, match=message):
        chat.commands.run(line)


def test_a_budget_of_other_attention(chat):
    chat.session.model = graft(llama.Model(chat.session.model.args), {"kind": "softmax"})
    with pytest.raises(UserError, match="need a model with selective attention"):
        chat.commands.run("/budget 9")


def test_help_lists_all_commands(chat, capsys):
    chat.commands.run("/help")
    printed = capsys.readouterr().err
    assert printed == HELP + "\n"
    assert {name for name in chat.commands._known} <= set(HELP.split())
    assert max(map(len, HELP.splitlines())) <= 80


def test_piped_commands():
    lines = "Hello\n/retry\n/undo\n/temp 0.5\n/budget 16\nHello\n/stats\n"
    command = [sys.executable, "-m", "mlx_selective", "chat", "--max-tokens", "6"]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.splitlines()
    assert len(answers) == 3 and answers[0] == answers[1]
    assert "are taken back" in done.stderr and "budget      16" in done.stderr
