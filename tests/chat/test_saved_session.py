"""Saved conversations go on as if nothing had been; what is damaged is refused by name."""

import json
import os
import stat

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from turns import LONG_MESSAGE, assert_same_caches, new_session, replay, take

from mlx_selective import graft
from mlx_selective.chat import saved_session as module
from mlx_selective.chat.loop import Chat
from mlx_selective.chat.saved_session import last_session, load_session, save_session
from mlx_selective.errors import UserError


@pytest.fixture
def saved(session, tmp_path):
    """The file of two turns, and the turns."""
    session.system_prompt = "Be kind. \u2028 \ud800"  # whatever a terminal hands over
    session.reset()
    turns = [take(session, "Hello", "end token"), take(session, LONG_MESSAGE, "stop 4")]
    return save_session(session, tmp_path / "talk"), turns


def test_it_goes_on_as_if_nothing_had_been(saved, session, model, builtin):
    path, turns = saved
    assert path.name == "talk.safetensors"
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    other = new_session(model, builtin[1])
    load_session(other, path.with_suffix(""))
    assert other.conversation.messages == session.conversation.messages
    assert other.system_prompt == session.system_prompt
    turns.append(take(other, "Why?", "max tokens"))
    assert turns[-1] == take(session, "Why?", "max tokens")
    assert_same_caches(other.prompt_cache, replay(model, turns))


def test_caches_of_mlx_lm_too(session, tmp_path):
    softmax = graft(llama.Model(session.model.args), {"kind": "softmax"})
    one, other = (new_session(softmax, session.tokenizer) for _ in range(2))
    take(one, "Hello", "stop 3")
    load_session(other, save_session(one, tmp_path / "talk.safetensors"))
    assert type(other.prompt_cache[0]) is KVCache
    assert take(other, LONG_MESSAGE, "stop 3") == take(one, LONG_MESSAGE, "stop 3")


def rewritten(path, change):
    """The file with its arrays and metadata changed."""
    arrays, metadata = mx.load(str(path), return_metadata=True)
    change(arrays, metadata)
    mx.eval(arrays)
    mx.save_safetensors(str(path), arrays, metadata)


def of(name, value):
    return lambda arrays, metadata: metadata.update({name: value})


def without(name):
    return lambda arrays, metadata: metadata.pop(name)


def array(name, change):
    return lambda arrays, metadata: arrays.update({name: change(arrays[name])})


@pytest.mark.parametrize(
    "change, message",
    [
        (of("0.version", "mlx-selective chat 9"), "was written as 'mlx-selective chat 9'"),
        (of("0.model", "0" * 64), "was saved with another model"),
        (without("0.model"), "is no conversation that /save wrote"),
        (of("0.messages", "["), "is no conversation that /save wrote"),
        (of("0.messages", "{}"), "is damaged"),
        (of("0.messages", json.dumps([{"role": "user", "content": "a"}])), "is damaged"),
        (of("0.messages", json.dumps([{"role": "user", "content": 1}] * 2)), "is damaged"),
        (of("0.messages", json.dumps([{"role": "user", "content": "a"}] * 2)), "is damaged"),
        (of("0.answer_ended", "1"), "is damaged"),
        (of("0.system_prompt", "[]"), "is damaged"),
        (of("1.0", "KVCache"), "is damaged"),
        (of("1.1", "os"), "is damaged"),
        (array("0.0", lambda a: a[:, :1]), "is damaged"),
        (array("1.2", lambda a: a - 1), "is damaged"),
        (array("2.3", lambda a: a * mx.nan), "is damaged"),
        (array("0.5", lambda a: a + 1), "is damaged"),
        (lambda arrays, metadata: arrays.pop("2.1"), "is damaged"),
    ],
)
def test_a_damaged_file_is_refused_and_changes_nothing(saved, session, model, change, message):
    path, turns = saved
    rewritten(path, change)
    messages = list(session.conversation.messages)
    with pytest.raises(UserError, match=message) as refused:
        load_session(session, path)
    assert str(path) in str(refused.value)
    assert session.conversation.messages == messages
    assert_same_caches(session.prompt_cache, replay(model, turns))


def test_every_shortened_file_is_refused(saved, session):
    path, _ = saved
    whole = path.read_bytes()
    for length in [*range(0, 64), *range(64, len(whole), len(whole) // 40)]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match="talk.safetensors"):
            load_session(session, path)
    with pytest.raises(UserError, match="no such file"):
        load_session(session, path.with_name("other"))


@pytest.mark.parametrize("step", ["save_prompt_cache", "fsync", "replace"])
def test_ended_while_it_saves_the_old_file_stays(saved, session, monkeypatch, step):
    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    path, _ = saved
    before = path.read_bytes()
    take(session, "Why?", "stop 3")
    with monkeypatch.context() as patched:
        if step == "save_prompt_cache":
            patched.setattr(module, step, killed)
        elif step == "fsync":
            patched.setattr(os, step, killed)
        else:
            patched.setattr("pathlib.Path.replace", killed)
        with pytest.raises(Killed):
            save_session(session, path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["talk.safetensors"]


def test_where_nothing_can_be_written(session, tmp_path):
    with pytest.raises(UserError, match="nothing was said yet"):
        save_session(session, tmp_path / "talk")
    take(session, "Hello", "stop 2")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save_session(session, tmp_path / "file" / "talk")


def words(capsys):
    """What was printed, whichever way its lines were broken."""
    return " ".join(capsys.readouterr().out.split())


def test_a_terminals_chat_is_kept_for_load(session, model, builtin, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = [
        Chat(new_session(model, builtin[1]), interactive=True, sampler=lambda _: None)
        for _ in range(2)
    ]
    made[0].answer("Hello")
    assert last_session().is_relative_to(tmp_path) and last_session().is_file()
    made[1].commands.run("/load")
    assert "(1 turn, " in words(capsys)
    assert made[1].session.conversation.messages == made[0].session.conversation.messages
    made[1].commands.run(f"/save {tmp_path}/mine")
    assert f"(saved in {tmp_path}/mine.safetensors)" in words(capsys)
    with pytest.raises(UserError, match="/save takes the name of a file"):
        made[1].commands.run("/save")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    made[1].answer("Hello")
    assert "(not kept for /load: " in words(capsys)
