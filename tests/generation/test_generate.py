"""The generate command, and generation from Python against mlx-lm's own."""

import io
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache

from mlx_selective import (
    PrunedKVCache,
    UserError,
    account,
    generate,
    load,
    make_prompt_cache,
    stream_generate,
)
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.cli import main

COMMAND = str(Path(sysconfig.get_path("scripts")) / "mlx-selective")
PROMPT = "Once upon a time there was a small dragon who lived in a wood by the sea, and"
BUDGET = 16


@pytest.fixture(scope="module")
def loaded():
    return load(BUILTIN_MODEL, BUDGET)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded[0]


@pytest.fixture(scope="module")
def tokenizer(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def exact():
    """The model in float32, in which the order of sums changes no greedy token."""
    model, _ = load(BUILTIN_MODEL)
    model.set_dtype(mx.float32)
    return model


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


def tokens_of(responses) -> list[int]:
    return [response.token for response in responses]


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
        (["--budget", "many"], "argument --budget: invalid int value: 'many'"),
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


@pytest.mark.parametrize("as_prompt", [list, mx.array, None], ids=["list", "array", "text"])
def test_tokens_are_those_of_mlx_lm_while_the_budget_is_not_reached(model, tokenizer, as_prompt):
    tokens = tokenizer.encode(PROMPT)
    full = [PrunedKVCache(None) for _ in model.layers]
    expected = list(
        mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=10, prompt_cache=full)
    )

    prompt = PROMPT if as_prompt is None else as_prompt(tokens)
    budget = len(tokens) + len(expected)
    responses = list(stream_generate(model, tokenizer, prompt, 10, budget=budget))

    assert tokens_of(responses) == tokens_of(expected)
    text = "".join(response.text for response in expected)
    assert "".join(response.text for response in responses) == text
    assert generate(model, tokenizer, prompt, budget=budget, max_tokens=10) == text


def test_the_budget_of_the_model_holds_without_another(model, tokenizer):
    tokens = tokenizer.encode(PROMPT)

    own, stock, larger = (
        list(responses)
        for responses in (
            stream_generate(model, tokenizer, tokens, 6),
            mlx_lm.stream_generate(model, tokenizer, tokens, 6),
            stream_generate(model, tokenizer, tokens, 6, budget=100),
        )
    )

    assert tokens_of(own) == tokens_of(stock)
    np.testing.assert_array_equal(own[-1].logprobs, stock[-1].logprobs)
    assert not np.array_equal(own[-1].logprobs, larger[-1].logprobs)


def test_greedy_tokens_are_those_of_the_whole_text_without_a_cache(exact, tokenizer):
    tokens = tokenizer.encode("Once upon a time there")
    expected = []
    for _ in range(6):
        logits = exact(mx.array([tokens + expected]))
        expected.append(mx.argmax(logits[0, -1]).item())

    assert tokens_of(stream_generate(exact, tokenizer, tokens, 6, budget=100)) == expected


@pytest.mark.parametrize("step", [1, 3, 12])
def test_the_chunks_of_the_prompt_change_nothing_within_the_budget(exact, tokenizer, step):
    whole = tokens_of(stream_generate(exact, tokenizer, PROMPT, 8, budget=100))

    options = {"prefill_step_size": step, "budget": 100}
    assert tokens_of(stream_generate(exact, tokenizer, PROMPT, 8, **options)) == whole


@pytest.mark.parametrize("step", [1, 3, BUDGET, 512])
def test_every_chunk_size_ends_at_the_budget(model, tokenizer, step):
    caches = make_prompt_cache(model)
    read = len(tokenizer.encode(PROMPT)) + len(
        list(
            stream_generate(
                model, tokenizer, PROMPT, 3, prompt_cache=caches, prefill_step_size=step
            )
        )
    )

    assert read > BUDGET + 3
    assert {(cache.size(), cache.offset) for cache in caches} == {(BUDGET, read)}


def test_a_cache_already_has_its_budget(model, tokenizer):
    caches = make_prompt_cache(model)
    options = {"budget": 8, "prompt_cache": caches}

    with pytest.raises(UserError, match="a budget or a prompt_cache"):
        generate(model, tokenizer, PROMPT, **options)
    with pytest.raises(UserError, match="a budget or a prompt_cache"):
        next(stream_generate(model, tokenizer, PROMPT, **options))
    assert all(cache.empty() for cache in caches)


def test_a_typed_line_feed_is_one_as_in_mlx_lm(command, tokenizer):
    flags = ["--ignore-chat-template", "-m", "1", "--format", "json"]
    record = json.loads(command("--prompt", "a\\nb\\tc", *flags)[1])
    assert record["prompt_tokens"] == len(tokenizer.encode("a\nb\tc"))


def test_text_reaches_the_terminal_as_text_only(model, tokenizer, monkeypatch, capsys):
    from mlx_selective.generation import stream

    def hostile(*args, **kwargs):
        for response in mlx_lm.stream_generate(*args, **kwargs):
            response.text = "\x1b]52;c;eA==\x07ok\x9b2J"
            yield response

    monkeypatch.setattr(stream, "stream_generate", hostile)
    returned = generate(model, tokenizer, "hi", verbose=True, max_tokens=1)
    printed = capsys.readouterr().out
    assert returned == "\x1b]52;c;eA==\x07ok\x9b2J"
    assert "]52;c;eA==ok2J" in printed
    assert not set(printed) & {"\x1b", "\x07", "\x9b"}


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


def test_verbose_prints_and_returns_the_text(model, tokenizer, capsys):
    silent = generate(model, tokenizer, PROMPT, max_tokens=3)
    assert capsys.readouterr().out == ""

    assert generate(model, tokenizer, PROMPT, verbose=True, max_tokens=3) == silent
    assert silent in (shown := capsys.readouterr().out) and "Cache: 16 of" in shown


def test_mlx_lm_makes_pruned_caches(model):
    caches = mlx_lm_cache.make_prompt_cache(model)
    assert {(type(cache), cache.size(), cache.offset) for cache in caches} == {
        (PrunedKVCache, 0, 0)
    }

    model(mx.arange(10, 40)[None], cache=caches)

    assert {(cache.size(), cache.offset) for cache in caches} == {(BUDGET, 30)}


@pytest.mark.parametrize("read", [0, 9, 40], ids=["empty", "all kept", "evicted"])
@pytest.mark.parametrize("budget", [BUDGET, None], ids=["budget", "no budget"])
def test_a_saved_cache_goes_on_as_if_it_had_stayed(model, tokenizer, tmp_path, read, budget):
    caches = [PrunedKVCache(budget) for _ in model.layers]
    if read:
        model(mx.arange(100, 100 + read)[None], cache=caches)
    file = str(tmp_path / "cache.safetensors")

    mlx_lm_cache.save_prompt_cache(file, caches, {"model": "built-in"})
    restored, metadata = mlx_lm_cache.load_prompt_cache(file, return_metadata=True)

    assert metadata == {"model": "built-in"}
    assert account(restored) == account(caches)
    for cache, old in zip(restored, caches, strict=True):
        assert type(cache) is PrunedKVCache
        assert (cache.offset, cache.budget, cache.empty()) == (read, budget, old.empty())
        for name in ("keys", "values", "positions", "F") if read else ():
            np.testing.assert_array_equal(getattr(cache, name), getattr(old, name))
    went_on, stayed = (
        tokens_of(stream_generate(model, tokenizer, "and then", 12, prompt_cache=each))
        for each in (restored, caches)
    )
    assert went_on == stayed
    assert account(restored) == account(caches)


def test_the_built_in_model_answers_at_25_tokens_a_second(tokenizer):
    model, _ = load(BUILTIN_MODEL)
    speeds = []
    while not speeds or (max(speeds) < 25 and len(speeds) < 3):
        *_, last = stream_generate(model, tokenizer, "Once upon a time", 40)
        speeds.append(last.generation_tps)

    assert max(speeds) >= 25
