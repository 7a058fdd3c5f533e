"""The chat command as a person and as a pipe meet it: real processes, a real terminal."""

import json
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.model import Model, ModelArgs

COMMAND = str(Path(sysconfig.get_path("scripts")) / "mlx-selective")
#: Nearly even odds for every token: an answer that goes on for as long as it may.
ENDLESS = ["--temp", "5", "--seed", "1", "--max-tokens", "100000"]
#: Seconds, for a busy machine.
PATIENCE = 60


@pytest.fixture(autouse=True, scope="module")
def interruptible():
    """Children inherit an ignored SIGINT, and a shell's background job ignores it."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(scope="module")
def quick_model(tmp_path_factory) -> str:
    """A folder with one layer of random weights: it says nothing, at once."""
    folder = tmp_path_factory.mktemp("quick")
    config = json.loads((BUILTIN_MODEL / "config.json").read_text())
    del config["quantization"], config["quantization_config"]
    config |= {"hidden_size": 32, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    mx.random.seed(0)
    weights = dict(tree_flatten(Model(ModelArgs(config)).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, folder)
    return str(folder)


def chat(text: str | bytes, *flags: str) -> subprocess.CompletedProcess:
    """Pipes lines through the command; stdout and stderr as text."""
    data = text.encode() if isinstance(text, str) else text
    run = subprocess.run(
        [COMMAND, "chat", *flags], input=data, capture_output=True, timeout=PATIENCE
    )
    run.stdout, run.stderr = run.stdout.decode(), run.stderr.decode()
    return run


def start(*arguments: str, program=(COMMAND,)) -> subprocess.Popen:
    """The command with pipes on all sides."""
    pipe = subprocess.PIPE
    return subprocess.Popen([*program, *arguments], stdin=pipe, stdout=pipe, stderr=pipe)


def finish(process: subprocess.Popen) -> str:
    """Waits, and gives what is left of stderr."""
    _, error = process.communicate(timeout=PATIENCE)
    return error.decode()


def test_one_piped_line_is_answered_on_stdout_alone_and_soon():
    seconds = []
    while not seconds or (min(seconds) > 10 and len(seconds) < 3):
        began = time.monotonic()
        run = chat("Tell me a story\n")
        seconds.append(time.monotonic() - began)

    assert run.returncode == 0
    assert run.stdout.strip() and run.stdout.endswith("\n")
    assert ">>" not in run.stdout and "tok/s" not in run.stdout
    assert all(line.startswith("(") for line in run.stderr.splitlines())
    assert min(seconds) < 10


def test_chat_py_is_the_same_command(tmp_path):
    """From any folder; without the package it says so in one line."""
    script = str(Path(__file__).resolve().parents[2] / "chat.py")
    asked = {"input": "Tell me a story\n", "capture_output": True, "text": True, "cwd": tmp_path}
    run = subprocess.run([sys.executable, script], timeout=PATIENCE, **asked)
    assert (run.returncode, run.stdout) == (0, chat("Tell me a story\n").stdout)
    bare = subprocess.run([sys.executable, "-S", script], timeout=PATIENCE, **asked)
    assert bare.returncode == 2
    assert bare.stderr.count("\n") == 1 and "is not installed" in bare.stderr


def test_piped_lines_are_turns_and_commands_speak_on_stderr():
    lines = ["Hello", "", "   ", "What is a cat?", "/stats", "/frob \x1b[2J now", "/help", "/reset"]
    run = chat("\n".join([*lines, "Hello"]), "--max-tokens", "8", "--budget", "16")

    assert run.returncode == 0
    first, second, again = run.stdout.splitlines()
    assert first and second and again == first
    assert re.search(r"^cache +16 of \d+ tokens kept in each layer, ", run.stderr, re.MULTILINE)
    assert re.search(r"[\d.]+ MB \(a full cache: [\d.]+ MB\)$", run.stderr, re.MULTILINE)
    assert re.search(r"^budget +16$", run.stderr, re.MULTILINE)
    assert "/frob is not a command." in run.stderr
    assert "Ctrl-C stops an answer" in run.stderr
    assert "(a new conversation)" in run.stderr
    assert "\x1b" not in run.stderr and "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("text", "answers"),
    [
        ("", 0),
        ("Hello\n/exit\nHello\n", 1),
        (b"caf\xe9 \xff\xfe\x80 \xed\xa0\xbd\nHello", 2),
    ],
    ids=["empty", "exit", "not UTF-8"],
)
def test_piped_input_of_any_shape(text, answers):
    run = chat(text, "--max-tokens", "4")

    assert (run.returncode, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) == answers


def test_a_line_longer_than_the_model_was_trained_to_read_is_answered_with_a_note(quick_model):
    lines = " ".join(["word"] * 5000) + "\nHello\n/stats\n"
    run = chat(lines, "--max-tokens", "4", "--model", quick_model)

    assert run.returncode == 0
    assert len(run.stdout.splitlines()) == 2
    assert run.stderr.count("longer than the 1024 tokens this model was trained to read") == 1
    kept, tokens = re.search(r"(\d+) of (\d+) tokens kept", run.stderr).groups()
    assert int(kept) == 128 and int(tokens) > 5000


def test_a_reader_that_leaves_early_gets_no_traceback():
    process = start("chat", "--max-tokens", "20")
    process.stdin.write(b"Hello\n" * 4)
    process.stdin.close()
    process.stdin = None
    assert process.stdout.read(1)
    process.stdout.close()
    process.stdout = None

    assert finish(process) == ""
    assert process.returncode == 141


def test_a_closed_input_is_an_empty_one():
    command = f"{shlex.quote(COMMAND)} chat <&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_an_interrupt_ends_a_piped_chat():
    process = start("chat", *ENDLESS)
    process.stdin.write(b"Hello\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)

    assert finish(process).strip() == "mlx-selective chat: interrupted."
    assert process.returncode == 130


@pytest.mark.parametrize("imported", ["mlx.core", "mlx_lm.models.base"])
def test_an_interrupt_while_it_loads_gives_no_traceback(imported):
    python = (sys.executable, "-X", "importtime", "-m", "mlx_selective")
    process = start("chat", program=python)
    for line in process.stderr:
        if line.decode().rpartition("|")[2].strip() == imported:
            break
    process.send_signal(signal.SIGINT)

    lines = finish(process).splitlines()
    said = [line for line in lines if line and not line.startswith("import time:")]
    assert said == ["mlx-selective chat: interrupted."]
    # Python ends by the signal itself where it came in code that a library runs from a string
    # (_Py_UnhandledKeyboardInterrupt); a shell says 130 of both
    assert process.returncode in (130, -signal.SIGINT)


class Terminal:
    """The command in a terminal of its own, as pty.spawn makes it.

    Used as a context; what comes out is read with :meth:`expect`.
    """

    SPAWN = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"

    def __init__(self, *flags: str):
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.SPAWN, COMMAND, "chat", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TERM": "dumb"},
        )
        self.unread = ""

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.process.kill()
        self.process.communicate()

    def type(self, keys: str) -> None:
        self.process.stdin.write(keys.encode())
        self.process.stdin.flush()

    def interrupt(self) -> None:
        """Types Ctrl-C, not so fast that the last keys are still being taken in."""
        time.sleep(0.3)
        self.type("\x03")

    def expect(self, pattern: str) -> str:
        """Reads until a regular expression matches; gives what came up to its end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while not (match := re.search(pattern, self.unread)):
                ready = selector.select(PATIENCE)
                data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
                assert data, f"no {pattern!r} in {self.unread!r}"
                self.unread += data.decode(errors="replace").replace("\r\n", "\n")
        text, self.unread = self.unread[: match.end()], self.unread[match.end() :]
        return text

    def leave(self, keys: str) -> int:
        """Types what ends the chat; gives the exit code."""
        self.type(keys)
        self.process.communicate(timeout=PATIENCE)
        return self.process.returncode


def test_a_person_sees_a_banner_answers_and_figures_and_leaves_with_exit():
    with Terminal("--max-tokens", "8", "--budget", "16") as terminal:
        banner = terminal.expect(">> ")
        assert "selective attention, 16 keys a layer" in banner
        assert "/reset" in banner and "Ctrl-D" in banner
        answers = []
        for _ in range(2):
            terminal.type("Hello\n")
            terminal.expect("Hello\n")
            answers.append(terminal.expect(r"\n(?=\[)"))
            terminal.expect(r"\d+ tokens · [\d.]+ tok/s · kept \d+ of \d+ · .*MB\]\n>> ")
            terminal.type("/reset\n")
            terminal.expect(r"\(a new conversation\)\n>> ")
        assert answers[0].strip() and answers[0] == answers[1]
        terminal.type("/help\n")
        assert "Ctrl-C stops an answer" in terminal.expect(r"goes on\.\n>> ")
        terminal.type("/stats\n")
        terminal.expect(r"cache +0 of 0 tokens kept.*\n>> ")

        assert terminal.leave("/exit\n") == 0


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on():
    with Terminal(*ENDLESS) as terminal:
        terminal.expect(">> ")
        tokens = []
        for text in ("Once", "More", "Again"):
            terminal.type(f"{text}\n")
            terminal.expect(f"{text}\n")
            terminal.expect(r"\S[^\[]*\S")
            terminal.interrupt()
            terminal.expect(r"\n\(stopped\)\n\[")
            tokens.append(int(re.search(r"kept \d+ of (\d+)", terminal.expect("\n>> "))[1]))
        assert tokens[0] < tokens[1] < tokens[2]

        assert terminal.leave("\x04") == 0


def test_ctrl_c_at_the_prompt_or_while_a_message_is_read_does_not_leave():
    with Terminal("--max-tokens", "4", "--prefill-step-size", "1") as terminal:
        terminal.expect(">> ")
        terminal.type("half a line")
        terminal.expect("half a line")
        terminal.interrupt()
        terminal.expect(r"\(/exit or Ctrl-D leaves\)\n>> ")
        # Read token by token, this takes seconds.
        terminal.type(" ".join(["word"] * 300) + "\n")
        terminal.expect("word\n")
        terminal.interrupt()
        assert "tok/s" not in terminal.expect(r"\(stopped\)\n>> ")
        terminal.type("/stats\n")
        terminal.expect(r"cache +0 of 0 tokens kept.*\n>> ")
        terminal.type("Hello\n")
        terminal.expect(r"tok/s.*\n>> ")

        assert terminal.leave("\x04") == 0
