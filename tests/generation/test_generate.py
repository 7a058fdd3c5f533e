"""Generation from Python, against mlx-lm's own."""

import re
import sysconfig
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models import cache as mlx_lm_cache
from tiny import grafted

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

COMMAND = str(Path(sysconfig.get_path("scripts")) / "mlx-selective")
PROMPT = "Once upon a time there was a small dragon who lived in a wood by the sea, and"
BUDGET = 16


@pytest.fixture(scope="module")
def exact():
    """The model in float32, in which the order of sums changes no greedy token."""
    model, _ = load(BUILTIN_MODEL)
    model.set_dtype(mx.float32)
    return model


def tokens_of(responses) -> list[int]:
    return [response.token for response in responses]


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


def test_a_draft_model_gives_the_same_greedy_text(tokenizer):
    model, draft = (grafted("llama", {"kind": "ssa"}, seed, vocab_size=8192) for seed in (0, 1))
    alone = generate(model, tokenizer, PROMPT, max_tokens=6)
    assert generate(model, tokenizer, PROMPT, max_tokens=6, draft_model=draft) == alone
    assert generate(model, tokenizer, PROMPT, max_tokens=6, draft_model=model) == alone


def test_a_pruned_cache_refuses_a_draft_model(model, tokenizer):
    draft = grafted("llama", {"kind": "ssa"}, vocab_size=8192)
    with pytest.raises(ValueError, match="trimmable"):
        generate(model, tokenizer, PROMPT, max_tokens=6, draft_model=draft)


def test_quantised_keys_are_accounted_for(tokenizer, capsys):
    model = grafted("llama", {"kind": "ssa"}, vocab_size=8192, hidden_size=256)
    options = {"kv_bits": 8, "quantized_kv_start": 0}
    generate(model, tokenizer, PROMPT, verbose=True, max_tokens=3, **options)
    assert re.search(r"Cache: (\d+) of \1 tokens kept", capsys.readouterr().out)


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
    # other tests may have the cores at the same time
    while not speeds or (max(speeds) < 25 and len(speeds) < 8):
        *_, last = stream_generate(model, tokenizer, "Once upon a time", 40)
        speeds.append(last.generation_tps)

    assert max(speeds) >= 25
