"""lora and fuse, each started for real: the adapter changes the model, and fused it stays so."""

import json
import math
import re

import mlx.core as mx
import pytest
from processes import MESSAGE, text_of

from mlx_selective import load

TRAINING = [
    *("--train", "--test", "--iters", 3, "--batch-size", 2, "--num-layers", 2),
    *("--learning-rate", "1e-2", "--steps-per-report", 1, "--val-batches", 1),
]


def logits(folder, **options):
    model, tokenizer = load(folder, **options)
    return model(mx.array([tokenizer.encode(MESSAGE)]))


def test_lora_then_fuse(run, side, kind, models, data, answer, tmp_path):
    folder = models(kind)
    printed = run(side, "lora", "--model", folder, "--data", data, *TRAINING)
    loss = float(re.search(r"Test loss ([\d.]+)", printed).group(1))
    assert 0 < loss < math.log(300)  # better than guessing among the vocabulary
    weights = mx.load(str(tmp_path / "adapters" / "adapters.safetensors"))
    trained = [name for name, value in weights.items() if name.endswith("lora_b") and value.any()]
    assert len(trained) == 2 * 7  # every projection of both layers

    options = {"adapter_path": str(tmp_path / "adapters")}
    tuned = logits(folder, **options)
    assert mx.abs(tuned - logits(folder)).max() > 0.1
    flags = ["--model", folder, "--adapter-path", "adapters", "--prompt", MESSAGE, "-m", 6]
    assert text_of(run(side, "generate", *flags)) == answer(folder, **options)

    run(side, "fuse", "--model", folder, "--adapter-path", "adapters", "--save-path", "fused")
    assert mx.allclose(logits(tmp_path / "fused"), tuned, atol=1e-4)
    config, source = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "fused", folder)
    )
    assert config == source
    printed = run("stock", "generate", "--model", "fused", "--prompt", MESSAGE, "-m", 6)
    assert text_of(printed) == answer(folder, **options)


def test_fuse_keeps_the_dtype_of_a_quantised_model(run, models, data, tmp_path):
    """Though the CPU computes it in float32."""
    flags = ["-q", "--q-group-size", 32, "--dtype", "bfloat16"]
    run("ours", "convert", "--hf-path", models("ssa"), "--mlx-path", "small", *flags)
    run("ours", "lora", "--model", "small", "--data", data, *TRAINING)
    run("ours", "fuse", "--model", "small", "--save-path", "fused")
    before, after = (
        mx.load(str(tmp_path / name / "model.safetensors")) for name in ("small", "fused")
    )
    assert {n: v.dtype for n, v in after.items()} == {n: v.dtype for n, v in before.items()}
    assert not mx.array_equal(*(f["model.layers.1.mlp.up_proj.weight"] for f in (before, after)))


@pytest.mark.parametrize(
    "example",
    [
        {"prompt": "hello", "completion": "you"},
        {"messages": [{"role": "user", "content": "hello"}]},
    ],
)
def test_other_forms_of_data_and_settings_from_a_file(run, models, tmp_path, example):
    (tmp_path / "train.jsonl").write_text(2 * (json.dumps(example) + "\n"))
    settings = {"model": str(models("ssa")), "data": ".", "train": True, "iters": 1}
    settings |= {"batch_size": 1, "num_layers": 1, "fine_tune_type": "dora"}
    (tmp_path / "settings.yaml").write_text(json.dumps(settings))
    printed = run("ours", "lora", "--config", "settings.yaml")
    assert "Training will proceed without validation" in printed
    assert (tmp_path / "adapters" / "adapters.safetensors").is_file()
