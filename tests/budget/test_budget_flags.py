"""--budget as keys or memory, --max-loss by the stored curve."""

import argparse
import json

import mlx.core as mx
import pytest
from tiny_checkpoints import llama

from mlx_selective import load, make_prompt_cache
from mlx_selective.budget.flags import Memory, budgets_of, key_bytes, keys_or_memory, percentage
from mlx_selective.cache import CacheAccount, account
from mlx_selective.cli import main
from mlx_selective.convert import convert


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")
    source = llama(kv_heads=2, tied=False).save(parent / "source")
    convert(str(source), parent / "model", attention="selective")
    return parent / "model"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("256", 256),
        ("-5", -5),
        ("64MB", Memory(64_000_000)),
        ("1.5 gb", Memory(1_500_000_000)),
        ("2KiB", Memory(2048)),
        ("100b", Memory(100)),
    ],
)
def test_keys_or_memory(text, expected):
    assert keys_or_memory(text) == expected


@pytest.mark.parametrize("text", ["many", "64XB", "1.5", "MB", "-1MB", "1e3", ""])
def test_what_is_neither(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be keys a layer such as 256"):
        keys_or_memory(text)


@pytest.mark.parametrize("text, share", [("1%", 0.01), ("0.5%", 0.005), ("0.02", 0.02), ("0", 0)])
def test_shares(text, share):
    assert percentage(text) == pytest.approx(share)


def test_memory_is_what_the_caches_take(folder):
    model, _ = load(folder)
    (per_key,) = set(key_bytes(model))
    for keys in (2, 3, 17):
        exact = 2 * per_key * (keys + 1)  # two layers, and a slot for the next token
        assert budgets_of(Memory(exact), model) == [keys, keys]
        assert budgets_of(Memory(exact + 2 * per_key - 1), model) == [keys, keys]
    model.exchange_attention(model.attention.with_budget([4, 12]))
    budgets = budgets_of(Memory(2 * per_key * 17), model)
    assert budgets == [8, 24]  # in their proportions
    cache = make_prompt_cache(model, budgets)
    model(mx.arange(60)[None] % 50, cache=cache)
    assert account(cache).bytes == 2 * per_key * 17


def test_generate_and_their_mistakes(folder, capsys):
    def run(*flags):
        model = ["--model", str(folder), "--prompt", "the cat " * 20, "--max-tokens", "3"]
        code = main(["generate", "--format", "json", "--ignore-chat-template", *model, *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    model, _ = load(folder)
    (per_key,) = set(key_bytes(model))
    code, out, _ = run("--budget", f"{2 * per_key * 10}B")
    cache = json.loads(out)["cache"]
    assert code == 0 and cache["budget"] == 9 and cache["bytes"] == 2 * per_key * 10
    code, _, error = run("--budget", "1KB")
    assert (
        code == 2
        and "--budget: the caches of 2 layers take at least 1,584 bytes, got 1,000." in error
    )
    code, _, error = run("--max-loss", "1%")
    assert code == 2 and "--max-loss needs" in error and "budgets.json" in error
    points = [
        {"budgets": [30, 30], "kept": 1.0, "perplexity": 10.0},
        {"budgets": [20, 20], "kept": 0.7, "perplexity": 10.05},
        {"budgets": [5, 7], "kept": 0.2, "perplexity": 10.09},
        {"budgets": [3, 3], "kept": 0.1, "perplexity": 10.2},
    ]
    curve = folder / "budgets.json"
    curve.write_text(json.dumps({"curve": points}))
    assert json.loads(run("--max-loss", "1%")[1])["cache"]["budget"] == [5, 7]
    assert json.loads(run("--max-loss", "50%")[1])["cache"]["budget"] == 3
    for damaged in ("{}", '{"curve": []}', '{"curve": [{"perplexity": "x"}]}', "[", "[1]"):
        curve.write_text(damaged)
        code, _, error = run("--max-loss", "1%")
        assert code == 2 and "budgets.json" in error and error.count("\n") == 1
    with pytest.raises(SystemExit) as end:
        run("--max-loss", "1%", "--budget", "9")
    assert end.value.code == 2 and "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize(
    "budget, text", [(None, None), (9, "9"), ([3, 9, 4], "3-9"), ([3, None], "3-all")]
)
def test_budgets_in_words(budget, text):
    assert CacheAccount(budget, 3, 9, 0, 0).budget_text == text
