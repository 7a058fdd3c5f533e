"""What stands in an adapter's folder after a run that was refused, broken off or repeated."""

import json
import os
import signal

import mlx.core as mx
import pytest
from adapter_folder import IDS, adapter, config, curve, logits, same, stop_after
from mlx_lm.tuner.trainer import default_loss

from mlx_selective import load
from mlx_selective.cli import main
from mlx_selective.convert import convert
from mlx_selective.errors import UserError
from mlx_selective.finetune import state
from mlx_selective.finetune.training import Run


def files():
    return {name: (os.stat(f"adapters/{name}").st_mtime_ns) for name in os.listdir("adapters")}


@pytest.mark.parametrize(
    "flags",
    [
        ["--resume", "-c", "rank4.yaml", "--iters", 10],
        ["--batch-size", 100, "--fine-tune-type", "dora"],
        ["-c", "rank4.yaml"],  # stopped before its first iteration
    ],
    ids=["other rank", "too few examples", "stopped at once"],
)
def test_a_run_that_comes_to_nothing_leaves_the_adapter(finetune, models, monkeypatch, flags):
    with open("rank4.yaml", "w") as file:
        file.write("lora_parameters: {rank: 4, dropout: 0.0, scale: 10.0}\n")
    assert finetune(models("selective"), "--memory-loss", 0.1)[0] == 0
    before, answer = files(), logits(models("selective"), IDS, adapter_path="adapters")
    monkeypatch.setattr(
        Run, "_stop_if_wanted", lambda self, iteration, own=Run._stop_if_wanted: _at_once(self, own)
    )
    assert finetune(models("selective"), *flags)[0] in (2, 130)
    assert files() == before
    assert mx.array_equal(logits(models("selective"), IDS, adapter_path="adapters"), answer)


def _at_once(run, own):
    run._wants_to_stop = True
    own(run, 0)


def test_a_gain_in_the_model_holds_in_training(finetune, models, tmp_path):
    half = models("half", {"kind": "selective", "gain": 0.5})
    assert finetune(half, iters=2)[0] == 0
    first = curve()[1]["train_loss"]
    assert finetune(models("selective"), iters=2)[0] == 0
    assert abs(first - curve()[1]["train_loss"]) > 1e-3
    # a way that ends at 1 says so, since the model has another
    assert finetune(half, "--retrofit", "--retrofit-iters", 2, iters=4)[0] == 0
    assert config()["attention_gain"] == 1
    assert load(half, adapter_path="adapters")[0].attention.gain == 1
    assert main(["fuse", "--model", str(half), "--save-path", "fused"]) == 0
    assert "gain" not in json.load(open("fused/config.json"))["attention"]


def test_a_gain_leaves_the_budget(finetune, models, monkeypatch):
    stop_after(monkeypatch, 2)
    finetune(models("selective"), "--retrofit")
    attention = load(models("selective"), budget=7, adapter_path="adapters")[0].attention
    assert attention.budget == 7 and 0 < attention.gain < 1


@pytest.mark.parametrize("failing", ["adapters", "training_state"])
def test_a_disk_that_is_full(finetune, models, monkeypatch, failing):
    assert finetune(models("selective"), iters=2)[0] == 0
    before, save = adapter(), mx.save_safetensors

    def full(path, *arguments):
        if failing in path:
            with open(path, "wb") as file:
                file.write(b"half")
            raise RuntimeError("[write] Unable to write 1783 bytes to file.")
        return save(path, *arguments)

    monkeypatch.setattr(state.mx, "save_safetensors", full)
    code, printed = finetune(models("selective"), "--save-every", 1, "--seed", 5)
    assert code == 2 and ".safetensors cannot be written: " in printed
    assert printed.count("error:") == 1 and "RuntimeError" not in printed
    assert same(adapter(), before)
    assert not [name for name in os.listdir("adapters") if "partial" in name]


def test_the_printed_command_goes_on_after_other_weights(finetune, models, monkeypatch):
    assert finetune(models("selective"), "--adapter-path", "first", iters=2)[0] == 0
    flags = ["--resume-adapter-file", "first/adapters.safetensors"]
    finetune(models("selective"), *flags, "--adapter-path", "whole")
    with monkeypatch.context() as patched:
        stop_after(patched, 3)
        assert finetune(models("selective"), *flags)[0] == 130
    assert finetune(models("selective"), *flags, "--resume")[0] == 0
    assert same(adapter(), adapter("whole"))


def test_other_weights_must_be_of_this_kind(finetune, models):
    with open("rank4.yaml", "w") as file:
        file.write("lora_parameters: {rank: 4, dropout: 0.0, scale: 10.0}\n")
    assert finetune(models("selective"), "--adapter-path", "first", iters=2)[0] == 0
    flags = ["--resume-adapter-file", "first/adapters.safetensors"]
    code, printed = finetune(models("selective"), *flags, "-c", "rank4.yaml")
    assert code == 2 and "has shape (64, 8), here (64, 4)" in printed


def test_states_are_saved_where_gradients_are_not_accumulated(finetune, models, monkeypatch):
    saved = []
    monkeypatch.setattr("mlx_selective.finetune.training.save_state", lambda *a: saved.append(a[3]))
    flags = ["--grad-accumulation-steps", 4, "--save-every", 3]
    assert finetune(models("selective"), *flags, iters=17)[0] == 0
    assert saved == [4, 8, 12, 16]


def test_keys_are_dropped_from_short_texts_too(finetune, models):
    assert finetune(models("selective"), iters=2)[0] == 0
    without = curve()
    assert finetune(models("selective"), "--shrink-buffer", "2:2", iters=2)[0] == 0
    assert abs(without[1]["train_loss"] - curve()[1]["train_loss"]) > 1e-3
    assert curve()[1]["budget"] == 2


def test_a_damaged_curve_is_no_obstacle(finetune, models, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 3)
        finetune(models("selective"))
    text = open("adapters/losses.jsonl").read()
    with open("adapters/losses.jsonl", "w") as file:
        file.write("nonsense\n" + text[:-20])
    assert finetune(models("selective"), "--resume")[0] == 0
    assert [point["iteration"] for point in curve() if "train_loss" in point][-3:] == [4, 5, 6]


@pytest.mark.parametrize("lost", ["random", "optimizer.", "weights."])
def test_a_state_that_is_not_whole(finetune, models, lost):
    assert finetune(models("selective"), iters=2)[0] == 0
    path = "adapters/training_state.safetensors"
    arrays, metadata = mx.load(path, return_metadata=True)
    kept = {name: value for name, value in arrays.items() if not name.startswith(lost)}
    mx.eval(kept)
    mx.save_safetensors(path, kept, metadata)
    code, printed = finetune(models("selective"), "--resume")
    assert code == 2 and "training_state.safetensors: " in printed
    assert printed.count("error:") == 1 and "Error)" not in printed


def test_ctrl_c_that_reaches_the_compiler_too(finetune, models, monkeypatch):
    """A terminal sends it to all processes of the command; MLX's own then fails."""
    steps = []

    def loss(model, *batch):
        steps.extend([model] * model.training)
        if len(steps) == 5 and model.training:
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("Could not load C++ shared library x.so")
        return default_loss(model, *batch)

    finetune(models("selective"), "--adapter-path", "whole")
    with monkeypatch.context() as patched:
        patched.setattr("mlx_selective.finetune.objective.default_loss", loss)
        code, printed = finetune(models("selective"), "--save-every", 2)
    assert code == 130 and "Stopped after iteration 4; to go on:" in printed
    assert finetune(models("selective"), "--resume")[0] == 0
    assert same(adapter(), adapter("whole")) and curve() == curve("whole")


def test_data_that_became_less(finetune, models, data):
    assert finetune(models("selective"), iters=2)[0] == 0
    lines = (data / "train.jsonl").read_text().splitlines()[:6]
    (data / "train.jsonl").write_text("\n".join(lines) + "\n")
    code, printed = finetune(models("selective"), "--resume")
    assert code == 2 and "was made with number of examples 9, now it is 6" in printed


# Opening an adapter -------------------------------------------------------------------------------


def test_an_adapter_of_another_kind_of_attention(finetune, models):
    assert finetune(models("softmax"), iters=2)[0] == 0
    with pytest.raises(UserError, match="made for softmax attention, the model has selective"):
        load(models("selective"), adapter_path="adapters")


def test_an_adapter_that_lacks_weights(finetune, models):
    assert finetune(models("selective"), iters=2)[0] == 0
    name, value = adapter().popitem()
    mx.eval(value)
    mx.save_safetensors("adapters/adapters.safetensors", {name: value})
    with pytest.raises(UserError, match="adapters.safetensors: lacks .* more"):
        load(models("selective"), adapter_path="adapters")


@pytest.mark.parametrize("content", ["{}", '{"num_layers": "2", "lora_parameters": {}}'])
def test_an_adapters_config_that_says_nothing(finetune, models, content):
    assert finetune(models("selective"), iters=2)[0] == 0
    with open("adapters/adapter_config.json", "w") as file:
        file.write(content)
    with pytest.raises(UserError, match="adapter_config.json: num_layers is missing or wrong"):
        load(models("selective"), adapter_path="adapters")


# Settings in a file, and data ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, message",
    [
        ("shrink_buffer: 512:32", 'in a file "512:128"'),
        ("retrofit: 'no'", "--retrofit must be true or false, got 'no'"),
        ("memory-loss: 5", "memory-loss is no setting (perhaps memory_loss)"),
        ("memory_loss: much", "--memory-loss must be a number"),
        ("retrofit_iters: 2.5", "--retrofit-iters must be a whole number, at least 1, got 2.5"),
        ("save_every: 0", "--save-every must be a whole number, at least 1, got 0"),
        ("test_batches: '4'", "--test-batches must be a whole number"),
        ("lora_parameters: 5", "lora_parameters must hold lines of the form name: value"),
        ("max_seq_length: true", "--max-seq-length must be a whole number"),
        ("fine_tune_type: dara", "--fine-tune-type must be one of lora, dora, full, temperatures"),
    ],
)
def test_settings_of_a_file_that_cannot_be(finetune, models, line, message):
    with open("settings.yaml", "w") as file:
        file.write(line + "\n")
    code, printed = finetune(models("selective"), "-c", "settings.yaml")
    assert code == 2 and message in printed and printed.count("error:") == 1
    assert not os.path.exists("adapters")


def test_a_validation_that_fills_no_batch(finetune, models, data):
    (data / "valid.jsonl").write_text('{"text": "a"}\n')
    code, printed = finetune(models("selective"))
    assert code == 2 and "valid.jsonl holds 1 examples, fewer than --batch-size 2" in printed


def test_prompts_of_the_test_that_leave_nothing(finetune, models, data):
    text = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    for part in ("train", "valid"):
        (data / f"{part}.jsonl").write_text(2 * text)
    long = json.dumps({"prompt": "hello " * 30, "completion": "you"}) + "\n"
    (data / "test.jsonl").write_text(text + long)
    flags = ["--test", "--mask-prompt", "--max-seq-length", 64]
    code, printed = finetune(models("selective"), *flags, iters=2)
    assert code == 2 and "test.jsonl, line 2: the prompt takes" in printed


def test_quantised_weights_are_not_trained(finetune, models, tmp_path):
    folder, source = tmp_path / "small", models("selective").parent / "source"
    convert(str(source), folder, attention="selective", quantize=True)
    code, printed = finetune(folder, "--fine-tune-type", "full")
    assert code == 2 and "--fine-tune-type full: quantised weights have no gradients" in printed


def test_a_layer_without_temperatures(finetune, models):
    mixed = models("mixed", [{"kind": "ssa"}, {"kind": "softmax"}])
    code, printed = finetune(mixed, "--fine-tune-type", "temperatures", "--num-layers", 1)
    assert code == 2 and "--num-layers 1: those layers have no temperatures" in printed
