"""Fine-tuning as the command does it, on tiny models: what is trained, saved and taken up again."""

import json
import os
import re
import shutil
import signal

import mlx.core as mx
import numpy as np
import pytest
from adapter_folder import IDS, adapter, config, curve, logits, same, stop_after
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner import trainer

from mlx_selective import load
from mlx_selective.cli import main
from mlx_selective.convert import convert
from mlx_selective.finetune.training import Run


@pytest.mark.parametrize("kind", ["lora", "dora", "full"])
def test_the_memory_loss_lowers_what_layers_need(finetune, models, kind):
    flags = ["--fine-tune-type", kind, "--num-layers", -1, "--learning-rate", "5e-4"]
    code, printed = finetune(models("selective"), *flags, "--memory-loss", 20, iters=24)
    assert code == 0
    needed = np.array([point["keys_needed"] for point in curve() if "keys_needed" in point])
    assert needed.shape == (24, 2)
    # an epoch has four batches
    assert needed[-4:].mean() < 0.8 * needed[:4].mean()
    assert re.search(r"Iter 24: Train loss [\d.]+, Keys needed [\d.]+% \(\d+ \d+\), ", printed)
    tuned = logits(models("selective"), IDS, adapter_path="adapters")
    assert mx.abs(tuned - logits(models("selective"), IDS)).max() > 0.01


def test_without_a_memory_loss_the_loss_is_mlx_lms(finetune, models):
    assert finetune(models("selective"))[0] == 0
    first = {k: v for k, v in curve()[1].items() if k != "keys_needed"}
    assert finetune(models("selective"), "--memory-loss", 0.5)[0] == 0
    more = curve()[1]
    added = 0.5 * np.mean(more["keys_needed"])
    assert more["train_loss"] == pytest.approx(first["train_loss"] + added, rel=1e-5)


# Going on -----------------------------------------------------------------------------------------


SETTINGS = {
    "lora": ["--memory-loss", 0.1],
    "dropout and a schedule": ["-c", "settings.yaml", "--optimizer", "adamw"],
    "retrofit": ["--retrofit", "--retrofit-iters", 7],
    "full": ["--fine-tune-type", "full", "--shrink-buffer", "9:3"],
    "accumulated": ["--grad-accumulation-steps", 2],
}


#: 20 places at random, so that each of five settings is stopped at four
STOPS = [
    (name, int(stop))
    for seed, name in enumerate(SETTINGS)
    for stop in np.random.default_rng(seed).choice(np.arange(2, 13), 4, replace=False)
]


@pytest.mark.parametrize("name, stop", STOPS)
def test_a_stopped_training_goes_on_as_if_nothing_had_been(
    finetune, models, data, monkeypatch, name, stop
):
    """Beyond the ends of epochs of four batches, and between two reports, too."""
    (data.parent / "settings.yaml").write_text(
        "lora_parameters: {rank: 4, dropout: 0.3, scale: 10.0}\n"
        "lr_schedule: {name: cosine_decay, arguments: [1e-2, 10], warmup: 3}\n"
    )
    flags = [*SETTINGS[name], "--save-every", 3, "--steps-per-report", 5]
    whole = finetune(models("selective"), *flags, "--adapter-path", "whole", iters=14)
    assert whole[0] == 0
    with monkeypatch.context() as patched:
        stop_after(patched, stop)
        code, printed = finetune(models("selective"), *flags, iters=14)
    accumulated = stop + stop % 2 if name == "accumulated" else stop
    assert code == 130 and f"Stopped after iteration {accumulated}; to go on:" in printed
    assert printed.count("--resume") == 1
    assert finetune(models("selective"), *flags, "--resume", iters=14)[0] == 0
    assert same(adapter(), adapter("whole"))
    reported = [point["iteration"] for point in curve() if "train_loss" in point]
    assert curve() == curve("whole") and reported == [5, 10, 14]
    assert config() | {"adapter_path": "", "resume": False} == config("whole") | {
        "adapter_path": ""
    }


def test_a_killed_training_goes_on_where_it_was_last_saved(finetune, models, monkeypatch):
    class Killed(BaseException):
        pass

    def follow(self, now, before=Run._follow_schedules):
        if now == 6:
            raise Killed
        return before(self, now)

    finetune(models("selective"), "--adapter-path", "whole")
    with monkeypatch.context() as patched:
        patched.setattr(Run, "_follow_schedules", follow)
        with pytest.raises(Killed):
            finetune(models("selective"), "--save-every", 2)
    assert finetune(models("selective"), "--resume")[0] == 0
    assert same(adapter(), adapter("whole")) and curve() == curve("whole")


def test_ctrl_c_before_the_first_iteration_and_twice(finetune, models, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 0)
        patched.setattr(Run, "_prepare", lambda self, last: os.kill(os.getpid(), signal.SIGINT))
        code, printed = finetune(models("selective"))
    assert code == 130 and "Stopped before an iteration was done" in printed
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        patched.setattr(trainer, "default_loss", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        code, printed = finetune(models("selective"), "--resume")
    assert code == 2 and "no such file; --resume goes on" in printed


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--memory-loss", 0.2], "was made with memory_loss 0.1, now it is 0.2"),
        (["--memory-loss", 0.1, "--seed", 4], "was made with seed 0, now it is 4"),
        (["--memory-loss", 0.1, "--iters", 3], "--resume: 3 of --iters 3 are done already"),
    ],
)
def test_going_on_with_something_else(finetune, models, flags, message):
    assert finetune(models("selective"), "--memory-loss", 0.1, iters=3)[0] == 0
    before = adapter()
    code, printed = finetune(models("selective"), "--resume", *flags)
    assert code == 2 and message in printed
    assert same(adapter(), before)


def test_a_damaged_state_is_named(finetune, models):
    assert finetune(models("selective"), iters=2)[0] == 0
    with open("adapters/training_state.safetensors", "r+b") as file:
        file.truncate(1000)
    code, printed = finetune(models("selective"), "--resume")
    assert code == 2 and "training_state.safetensors" in printed and printed.count("error:") == 1


# A softmax model on its way ----------------------------------------------------------------------


def test_a_retrofit_starts_at_the_softmax_model_and_ends_at_the_papers(finetune, models):
    code, _ = finetune(models("selective"), "--retrofit", "--retrofit-iters", 4, iters=8)
    assert code == 0
    gains = [point["gain"] for point in curve() if "gain" in point]
    assert gains == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1, 1, 1])
    first = next(point for point in curve() if "train_loss" in point)
    assert finetune(models("softmax"), iters=8)[0] == 0
    assert first["train_loss"] == pytest.approx(curve()[1]["train_loss"], rel=1e-5)
    assert "attention_gain" not in config()


def test_a_gain_below_one_goes_with_the_adapter(finetune, models, monkeypatch):
    stop_after(monkeypatch, 3)
    flags = ["--retrofit", "--retrofit-iters", 4]
    assert finetune(models("selective"), *flags)[0] == 130
    assert config()["attention_gain"] == 0.5
    model, _ = load(models("selective"), adapter_path="adapters")
    assert model.attention.gain == 0.5
    whole = model(IDS)
    cache = make_prompt_cache(model)
    parts = [model(IDS[:, n : n + 1], cache=cache) for n in range(IDS.shape[1])]
    assert mx.allclose(mx.concatenate(parts, axis=1), whole, atol=1e-4)
    assert mx.abs(whole - logits(models("selective"), IDS)).max() > 1e-2
    assert main(["fuse", "--model", str(models("selective")), "--save-path", "fused"]) == 0
    assert json.load(open("fused/config.json"))["attention"]["gain"] == 0.5
    assert mx.allclose(logits("fused", IDS), whole, atol=1e-4)


# SSA ---------------------------------------------------------------------------------------------

SSA = {"kind": "ssa", "token_map": "weight_sharing"}


def test_only_temperatures(finetune, models):
    folder = models("ssa sharing", SSA)
    code, printed = finetune(folder, "--fine-tune-type", "temperatures", iters=12)
    assert code == 0
    names = adapter().keys()
    assert names and all("temperature" in name for name in names)
    share = float(re.search(r"The method's own parameters: ([\d.]+)% of all", printed)[1])
    model, _ = load(folder)
    sizes = {n: v.size for n, v in tree_flatten(model.parameters())}
    own = sum(size for name, size in sizes.items() if "temperature" in name)
    assert share == pytest.approx(100 * own / sum(sizes.values()), abs=1e-3)
    assert curve()[-1]["train_loss"] < curve()[1]["train_loss"]
    model, _ = load(folder, adapter_path="adapters")
    for name, value in tree_flatten(model.parameters()):
        if name in names:
            assert mx.array_equal(value, adapter()[name])
    assert mx.abs(model(IDS) - logits(folder, IDS)).max() > 1e-3


def test_temperatures_beside_adapters_in_the_last_layer(finetune, models):
    folder = models("ssa sharing", SSA)
    assert finetune(folder, "--num-layers", 1)[0] == 0
    names = set(adapter())
    assert {n for n in names if "temperature" in n} == {
        f"model.layers.1.self_attn.{part}_temperature.{leaf}"
        for part in ("query", "value")
        for leaf in ("weight", "alpha")
    }
    assert any(name.endswith("lora_a") for name in names)
    tuned = logits(folder, IDS, adapter_path="adapters")
    assert main(["fuse", "--model", str(folder), "--save-path", "fused"]) == 0
    assert mx.allclose(logits("fused", IDS), tuned, atol=1e-4)


# Mistakes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--memory-loss", -1], "--memory-loss must be a number, 0 or more, got -1.0"),
        (["--retrofit-iters", 3], "--retrofit-iters goes with --retrofit"),
        (["--retrofit", "--retrofit-iters", 6], "must be from 1 to --iters - 1, 5"),
        (["--shrink-buffer", "4"], "--shrink-buffer must be FROM:TO"),
        (["--shrink-buffer", "3:9"], "--shrink-buffer must be FROM:TO"),
        (["--resume-adapter-file", "x"], "--resume-adapter-file x: no such file"),
        (["--grad-accumulation-steps", 7], "nothing would be trained"),
        (["--max-seq-length", 1], "--max-seq-length must be a whole number, at least 2, got 1"),
        (["--val-batches", 0], "--val-batches must be a whole number, at least 1, or -1 for all"),
        (["--seed", 2**32 - 1], "--seed must be at most 2147483648"),
        (["--retrofit", "--iters", 1], "--retrofit needs 2 --iters or more"),
        (["--fine-tune-type", "temperatures"], "needs a model with SSA; this is selective"),
        (["--num-layers", 9], "Requested to train 9 layers but the model only has 2"),
    ],
)
def test_flags_that_cannot_be(finetune, models, flags, message):
    code, printed = finetune(models("selective"), *flags)
    assert code == 2 and message in printed and printed.count("error:") == 1
    assert not os.path.exists("adapters/adapters.safetensors")


@pytest.mark.parametrize(
    "flags", [["--memory-loss", 0.1], ["--retrofit"], ["--shrink-buffer", "9:4"]], ids=str
)
@pytest.mark.parametrize("kind", ["softmax", "stick_breaking"])
def test_what_needs_selective_attention(finetune, models, kind, flags):
    code, printed = finetune(models(kind), *flags)
    assert code == 2 and f"{flags[0]} needs a model with selective attention; this is" in printed


def test_a_prompt_that_leaves_nothing_to_learn(finetune, models, data):
    example = {"prompt": "hello " * 30, "completion": "you"}
    text = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    (data / "train.jsonl").write_text(2 * text + json.dumps(example) + "\n")
    (data / "valid.jsonl").write_text(2 * text)
    code, printed = finetune(models("selective"), "--mask-prompt", "--max-seq-length", 64)
    assert code == 2 and "train.jsonl, line 3: the prompt takes" in printed, printed


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fusing_into_few_bits_tells_what_is_lost(finetune, models, tmp_path, capsys, kind):
    folder = tmp_path / "small"
    convert(
        str(models("selective").parent / "source"), folder, attention="selective", quantize=True
    )
    assert finetune(folder, "--fine-tune-type", kind)[0] == 0
    exact = logits(folder, IDS, adapter_path="adapters")
    fuse = ["fuse", "--model", str(folder), "--save-path"]
    assert main([*fuse, "fused"]) == 0
    printed = capsys.readouterr().out
    lost = int(
        re.search(r"quantised weights, (\d+)% of the change that was trained is", printed)[1]
    )
    assert main([*fuse, "whole", "--dequantize"]) == 0
    assert "is lost" not in capsys.readouterr().out
    assert mx.abs(logits("whole", IDS) - exact).max() < 1e-3
    # by mlx-lm's own weights
    error = change = 0
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weights = []
        for model in (folder, "fused", "whole"):
            layer = load(model)[0].model.layers[0].self_attn[name]
            weights.append(layer.weight)
            if model != "whole":
                settings = {"group_size": layer.group_size, "bits": layer.bits}
                weights[-1] = mx.dequantize(*weights[-1:], layer.scales, layer.biases, **settings)
        error += ((weights[1] - weights[2]) ** 2).sum().item()
        change += ((weights[0] - weights[2]) ** 2).sum().item()
    assert lost / 100 == pytest.approx((error / change) ** 0.5, rel=0.3, abs=0.02)
    assert ("--dequantize keeps it" in printed) == (lost > 5)


def test_a_tokenizer_that_ends_nothing(finetune, models, tmp_path):
    folder = tmp_path / "endless"
    shutil.copytree(models("selective"), folder)
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        if (folder / name).exists():
            settings = json.loads((folder / name).read_text())
            for field in ("eos_token", "eos_token_id"):
                settings.pop(field, None)
            (folder / name).write_text(json.dumps(settings))
    code, printed = finetune(folder)
    assert code == 2 and "the tokenizer has no token that ends a text" in printed, printed


@pytest.mark.parametrize(
    "lines, message",
    [
        ("", "train.jsonl holds no examples"),
        ('{"text": "a"}\n{"text": 3}\n', "train.jsonl, line 2: 'text' must be text"),
        ('{"text": "a"}\n{"text"\n', "train.jsonl, line 2: not JSON"),
        ('{"text": "a"}\n', "train.jsonl holds 1 examples, fewer than --batch-size 2"),
    ],
)
def test_data_that_cannot_be(finetune, models, data, lines, message):
    (data / "train.jsonl").write_text(lines)
    code, printed = finetune(models("selective"))
    assert code == 2 and message in printed and printed.count("error:") == 1
