"""The generate command."""

import io
import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mlx_selective import generate
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.cli import main

COMMAND = str(Path(sysconfig.get_path("scripts")) / "mlx-selective")
PROMPT = "Once upon a time there was a small dragon who lived in a wood by the sea, and"
BUDGET = 16


@pytest.fixture
def command(capsys):
    """Runs ``mlx-selective generate``; gives exit code, stdout and stderr."""

    def run(*flags: str):
        try:
            code = main(["generate", *flags])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def typed(monkeypatch):
    """Puts bytes on stdin."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(("budget", "pruned"), [(BUDGET, True), (1000, False)])
def test_json_is_one_object_with_the_account_of_the_cache(command, budget, pruned):
    code, out, error = command(
        "--model", str(BUILTIN_MODEL), "--prompt", PROMPT, "--max-tokens", "6",
        "--budget", str(budget), "--format", "json",
    )  # fmt: skip

    record = json.loads(out)
    assert (code, error, out.count("\n")) == (0, "", 1)
    assert list(record) == [
        "text", "prompt_tokens", "generation_tokens", "generation_tps", "peak_memory", "cache",
    ]  # fmt: skip
    cache = record["cache"]
    assert list(cache) == ["budget", "kept", "bytes", "full_bytes"]
    tokens = record["prompt_tokens"] + record["generation_tokens"]
    assert 1 <= record["generation_tokens"] <= 6 and tokens > BUDGET
    assert record["text"] and record["generation_tps"] > 0 and record["peak_memory"] > 0
    assert (cache["budget"], cache["kept"]) == (budget, min(budget, tokens))
    assert (cache["bytes"] < cache["full_bytes"]) == pruned


def test_the_installed_command_reads_stdin_and_prints_nothing_else(command):
    flags = ["--max-tokens", "5", "--format", "json"]
    run = subprocess.run(
        [COMMAND, "generate", "--prompt", "-", *flags],
        input=PROMPT.encode(),
        capture_output=True,
        timeout=60,
    )

    assert (run.returncode, run.stderr) == (0, b"")
    given = json.loads(command("--prompt", PROMPT, *flags)[1])
    read = json.loads(run.stdout)
    same = ("text", "prompt_tokens", "generation_tokens", "cache")
    assert [read[key] for key in same] == [given[key] for key in same]


def test_text_ends_in_the_lines_of_mlx_lm_and_the_cache(command, model, tokenizer):
    code, out, error = command("--prompt", PROMPT, "--max-tokens", "6", "--budget", str(BUDGET))

    assert (code, error) == (0, "")
    _, text, figures = re.split("^={10}\n", out, flags=re.MULTILINE)
    assert re.fullmatch(
        r"Prompt: \d+ tokens, [\d.]+ tokens-per-sec\n"
        r"Generation: \d+ tokens, [\d.]+ tokens-per-sec\n"
        r"Peak memory: [\d.]+ GB\n"
        rf"Cache: {BUDGET} of \d+ tokens kept in each layer, [\d.]+ MB .a full cache: [\d.]+ MB.\n",
        figures,
    )
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True
    )
    assert text == generate(model, tokenizer, prompt, max_tokens=6) + "\n"


def test_the_chat_template_can_be_left_out(command, tokenizer):
    flags = ["--prompt", "Once upon", "--max-tokens", "2", "--format", "json"]
    raw = json.loads(command(*flags, "--ignore-chat-template")[1])

    assert raw["prompt_tokens"] == len(tokenizer.encode("Once upon"))
    assert json.loads(command(*flags)[1])["prompt_tokens"] > raw["prompt_tokens"]


@pytest.mark.parametrize("flags", [[], ["--top-p", "0.9", "--min-p", "0.02", "--top-k", "99999"]])
def test_a_seed_repeats_what_is_sampled(command, flags):
    sampled = ["--prompt", PROMPT, "--max-tokens", "8", "--temp", "2", "--format", "json", *flags]
    first, second, other = (
        json.loads(command(*sampled, "--seed", seed)[1])["text"] for seed in ("7", "7", "8")
    )

    assert first == second != other


def test_bytes_that_are_no_text_are_replaced(command, typed):
    flags = ["--max-tokens", "2", "--format", "json", "--prompt"]
    typed(b"caf\xe9")
    read = json.loads(command(*flags, "-")[1])
    given = json.loads(command(*flags, "caf\udce9")[1])

    assert given["prompt_tokens"] == read["prompt_tokens"]
    assert given["text"] == read["text"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "-"], "the prompt is empty"),
        (["--prompt", "", "--ignore-chat-template"], "the prompt is empty"),
        (["--budget", "1"], "budget must be at least 2 keys a layer"),
        (["--budget", "-5"], "budget must be at least 2 keys a layer"),
        (["--budget", "many"], "argument --budget: must be keys a layer such as 256"),
        (["--max-tokens", "0"], "argument --max-tokens/-m: must be at least 1, got 0"),
        (["--max-tokens", "-3"], "argument --max-tokens/-m: must be at least 1, got -3"),
        (["--prefill-step-size", "0"], "argument --prefill-step-size: must be at least 1, got 0"),
        (["--temp", "-1"], "argument --temp: must be at least 0, got -1"),
        (["--temp", "nan"], "argument --temp: must be at least 0, got nan"),
        (["--temp", "inf"], "argument --temp: must be at least 0, got inf"),
        (["--top-p", "1.5"], "argument --top-p: must be from 0 to 1, got 1.5"),
        (["--min-p", "-0.1"], "argument --min-p: must be from 0 to 1, got -0.1"),
        (["--top-k", "-1"], "argument --top-k: must be at least 0, got -1"),
        (["--seed", "-1"], "argument --seed: must be from 0 to 18446744073709551615, got -1"),
        (["--format", "xml"], "argument --format: invalid choice: 'xml'"),
        (["--model", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(command, typed, flags, reason):
    typed(b"")
    code, out, error = command(*flags)

    (line,) = error.splitlines()
    assert (code, out) == (2, "")
    assert line.startswith("mlx-selective generate: error: ") and reason in line


def test_a_typed_line_feed_is_one_as_in_mlx_lm(command, tokenizer):
    flags = ["--ignore-chat-template", "-m", "1", "--format", "json"]
    record = json.loads(command("--prompt", "a\\nb\\tc", *flags)[1])
    assert record["prompt_tokens"] == len(tokenizer.encode("a\nb\tc"))


def test_what_a_template_says_cannot_steer_the_terminal(tmp_path, capsys):
    shutil.copytree(BUILTIN_MODEL, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    hostile = {"chat_template": "{{ raise_exception('\x1b]0;owned\x07\x1b[2J') }}"}
    config.write_text(json.dumps(json.loads(config.read_text()) | hostile))
    assert main(["generate", "--model", str(tmp_path / "model"), "--prompt", "hi"]) == 2
    error = capsys.readouterr().err
    assert "]0;owned[2J" in error and error.count("\n") == 1
    assert not set(error) & {"\x1b", "\x07"}


@pytest.mark.parametrize("template", ["{{ 1/0 }}", "{{ messages + 1 }}"])
def test_a_template_that_fails_is_told_in_one_line(template, tmp_path, capsys):
    shutil.copytree(BUILTIN_MODEL, tmp_path / "model")
    config = tmp_path / "model" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))
    assert main(["generate", "--model", str(tmp_path / "model"), "--prompt", "hi"]) == 2
    error = capsys.readouterr().err
    assert "chat template refuses the messages" in error and error.count("\n") == 1


@pytest.mark.parametrize("line", ["doctor >&-", "generate --prompt hi -m 2 >&-", "--help >&-"])
def test_a_closed_output_is_an_empty_one(line):
    result = subprocess.run(
        ["sh", "-c", f'"{COMMAND}" {line}'], stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_full_disk_is_told_in_one_line():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "mlx_selective", "generate", "--prompt", "hi", "-m", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and "No space left on device" in result.stderr
