"""generate, chat, convert, benchmark and cache_prompt, each started for real."""

import json
import re
import shutil

import mlx.core as mx
import pytest
from mlx_lm.models.cache import load_prompt_cache
from processes import BUDGET, MESSAGE, text_of

from mlx_selective import PrunedKVCache, generate, load
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.generation.prompt_cache_file import continued_prompt
from mlx_selective.output import safe_text


def test_generate(run, side, kind, models, answer):
    printed = run(side, "generate", "--model", models(kind), "--prompt", MESSAGE, "-m", 6)
    assert text_of(printed) == answer(models(kind))
    assert re.search(r"Prompt: \d+ tokens, .*\nGeneration: 6 tokens", printed)


def test_chat(run, side, models, answer):
    folder = models("selective")
    printed = run(side, "chat", "--model", folder, "-m", 6, typed=f"{MESSAGE}\nq\n")
    printed = safe_text(re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed))
    assert answer(folder) in printed


def test_convert_quantises(run, side, models, tmp_path):
    """The two sides write the same tensors, which the folder's own code opens too."""
    source = models("selective")
    flags = ["--hf-path", source, "--mlx-path", "small", "-q", "--q-group-size", 32]
    run(side, "convert", *flags)
    before = mx.load(str(source / "model.safetensors"))
    after = mx.load(str(tmp_path / "small" / "model.safetensors"))
    name = "model.layers.1.mlp.up_proj"
    parts = mx.quantize(before[f"{name}.weight"], 32, 4)
    for part, expected in zip(("weight", "scales", "biases"), parts, strict=True):
        assert mx.array_equal(after[f"{name}.{part}"], expected)
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4 and config["attention"]["budget"] == BUDGET
    logits, expected = (load(f)[0](mx.arange(4, 20)[None]) for f in (tmp_path / "small", source))
    assert 0 < mx.abs(logits - expected).max() < 0.5 * mx.abs(expected).max()
    printed = run("stock", "generate", "--model", "small", "--prompt", MESSAGE, "-m", 3)
    assert "Generation: 3 tokens" in printed


def test_convert_quantises_a_model_of_two_attentions(run, side, models, tmp_path):
    source = models("mixed")
    flags = ["--hf-path", source, "--mlx-path", "small", "-q", "--q-group-size", 32]
    run(side, "convert", *flags, "--q-bits", 8)
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "small")
    )
    assert after["attention"] == before["attention"]
    assert [layer["kind"] for layer in after["attention"]] == ["selective", "softmax"]
    logits, expected = (load(f)[0](mx.arange(4, 20)[None]) for f in (tmp_path / "small", source))
    assert 0 < mx.abs(logits - expected).max() < 0.05 * mx.abs(expected).max()


def test_benchmark(run, side, models):
    flags = ["-p", 12, "-g", 3, "-n", 2]
    printed = run(side, "benchmark", "--model", models("selective"), *flags)
    assert "prompt_tokens=12, generation_tokens=3, batch_size=1" in printed
    assert printed.count("Trial ") == 2
    figures = re.search(
        r"Averages: prompt_tps=(\S+), generation_tps=(\S+), peak_memory=\S+", printed
    )
    assert all(float(figure) > 0 for figure in figures.groups())


def test_cache_prompt(run, side, kind, models, tmp_path):
    """Its file holds the caches of the prompt, and generate goes on from it."""
    folder, prefix, rest = models(kind), "hello there", ", how are you?"
    flags = ["--prompt-cache-file", "saved.safetensors"]
    run(side, "cache_prompt", "--model", folder, "--prompt", prefix, *flags)
    caches, metadata = load_prompt_cache(str(tmp_path / "saved.safetensors"), return_metadata=True)
    model, tokenizer = load(folder)
    chat = [{"role": "user", "content": prefix}]
    tokens = tokenizer.apply_chat_template(chat, continue_final_message=True)
    assert metadata["model"] == str(folder)
    assert [cache.offset for cache in caches] == [len(tokens)] * 2
    pruned = [cache for cache in caches if isinstance(cache, PrunedKVCache)]
    assert len(pruned) == {"selective": 2, "mixed": 1}.get(kind, 0)
    assert all(cache.kept == [BUDGET] for cache in pruned)

    printed = run("ours", "generate", *flags, "--prompt", rest, "-m", 6, "--format", "json")
    record = json.loads(printed)
    suffix = continued_prompt(tokenizer, rest)
    assert tokenizer.decode(suffix).startswith(rest) and record["prompt_tokens"] == len(suffix)
    expected = generate(model, tokenizer, suffix, max_tokens=6, prompt_cache=caches)
    assert record["text"] == expected
    if kind == "stick_breaking":  # mlx-lm's cache, which its generate reads before the model
        stock = run("stock", "generate", *flags, "--prompt", rest, "-m", 6)
        assert text_of(stock) == safe_text(expected)


@pytest.mark.parametrize("attention", ["ssa", "softmax"])
def test_a_prompt_in_two_parts_is_the_prompt(run, models, answer, attention):
    folder, file = models(attention), "saved"
    cache_flags = ["--prompt-cache-file", file]
    run("ours", "cache_prompt", "--model", folder, "--prompt", MESSAGE[:9], *cache_flags)
    again = ["--model", f"{folder}/../{folder.name}", "--prompt", MESSAGE[9:], "-m", 6]
    assert text_of(run("ours", "generate", *cache_flags, *again)) == answer(folder)


def test_a_prompt_without_template_goes_on_as_plain_text(run, models, tmp_path):
    """No token that begins a text comes in its middle, as it would with a fresh prompt."""
    folder = shutil.copytree(models("ssa"), tmp_path / "plain")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    flags = ["--prompt-cache-file", "saved.safetensors"]
    run("ours", "cache_prompt", "--model", folder, "--prompt", MESSAGE[:9], *flags)
    printed = run("ours", "generate", *flags, "--prompt", MESSAGE[9:], "-m", 6)
    model, tokenizer = load(folder)
    expected = generate(model, tokenizer, MESSAGE, max_tokens=6)
    assert text_of(printed) == safe_text(expected)


def test_the_built_in_model_is_the_default(run):
    printed = run("ours", "benchmark", "-p", 4, "-g", 2, "-n", 1)
    assert "Averages: " in printed
    run("ours", "cache_prompt", "--prompt", "Once upon a time", "--prompt-cache-file", "saved")
    record = json.loads(
        run("ours", "generate", "--prompt-cache-file", "saved", "--prompt", " there", "-m", 4,
            "--format", "json")
    )  # fmt: skip
    assert record["generation_tokens"] == 4 and record["text"].strip()
    tokenizer = load(BUILTIN_MODEL)[1]
    chat = [{"role": "user", "content": "Once upon a time"}]
    prefix = tokenizer.apply_chat_template(chat, continue_final_message=True)
    assert record["cache"]["kept"] == len(prefix) + record["prompt_tokens"] + 4
