"""What a -c file, a folder or data may have wrong, told before an older adapter is touched."""

import json
import os
import shutil

import mlx.core as mx
import pytest
from adapter_folder import adapter, config, curve, same, stop_after

from mlx_selective.cli import main


def settings(text):
    with open("settings.yaml", "w") as file:
        file.write(text)
    return ["-c", "settings.yaml"]


def test_the_model_of_a_file_is_trained(data, models, capsys):
    flags = settings(
        f"model: {models('softmax')}\ntrain: true\ndata: data\niters: 1\nbatch_size: 1\n"
    )
    assert main(["finetune", *flags]) == 0
    assert config()["model"] == str(models("softmax"))
    assert config()["attention_kind"] == "softmax"
    # what the printed command says is what was typed
    assert "builtin" not in capsys.readouterr().out


def test_home_is_meant_by_a_tilde(finetune, models, data, monkeypatch):
    monkeypatch.setenv("HOME", str(data.parent))
    assert (
        finetune(models("softmax"), "--adapter-path", "~/mine", "--data", "~/data", iters=1)[0] == 0
    )
    assert (data.parent / "mine" / "adapters.safetensors").is_file() and not os.path.exists("~")


@pytest.mark.parametrize(
    "text, message",
    [
        ("itters: 5", "itters is no setting (perhaps iters)"),
        ("5: 6", "5 is no setting."),
        ("adapter_path: 5", "--adapter-path must be text, got 5"),
        ("resume_adapter_file: nowhere", "--resume-adapter-file nowhere: no such file"),
        ("optimizer: 5", "--optimizer must be a name, got 5"),
        ("lora_parameters: {dropout: 0.0, scale: 1.0}", "rank must be a whole number from 1 on"),
        ("lora_parameters: {rank: 0, dropout: 0.0, scale: 1.0}", "from 1 on, got 0"),
        ("lora_parameters: {rank: '8', dropout: 0.0, scale: 1.0}", "from 1 on, got '8'"),
        ("lora_parameters: {rank: 2, dropout: 1.0, scale: 1.0}", "dropout must be a number"),
        ("lora_parameters: {rank: 2, dropout: 0.0, scale: .nan}", "scale must be a number"),
        ("lora_parameters: {rank: 2, dropout: 0, scale: 1, keys: [foo]}", "name no layer"),
        ("lora_parameters: {rank: 2, dropout: 0, scale: 1, keys: foo}", "must be a list of names"),
        ("lr_schedule: cosine_decay", "lr_schedule must hold a name and its arguments"),
        ("lr_schedule: {name: foo, arguments: [1]}", "lr_schedule.name must be a schedule"),
        ("lr_schedule: {name: cosine_decay, arguments: [.nan, 9]}", "arguments must be a list"),
        ("lr_schedule: {name: cosine_decay, arguments: [-1, 9]}", "arguments must be a list"),
        ("optimizer_config: {adam: null}", "optimizer_config.adam must hold lines"),
    ],
)
def test_settings_that_cannot_be(finetune, models, text, message):
    code, printed = finetune(models("softmax"), *settings(text), iters=1)
    assert code == 2 and message in printed and printed.count("error:") == 1
    assert not os.path.exists("adapters/adapters.safetensors")


def test_a_start_that_fails_leaves_the_curve_of_the_one_before(finetune, models, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        assert finetune(models("softmax"), iters=6)[0] == 130
    before = curve()
    assert [point["iteration"] for point in before if "train_loss" in point] == [1, 2, 3, 4]
    optimizer = settings("optimizer_config: {adam: {betas: [0.9]}}")
    assert finetune(models("softmax"), *optimizer)[0] == 2
    assert finetune(models("softmax"), "--learning-rate", "1e30")[0] == 2  # in the middle
    assert curve() == before
    assert finetune(models("softmax"), "--resume", iters=6)[0] == 0
    assert curve()[: len(before)] == before and len(curve()) > len(before)


def test_a_loss_that_is_no_number_ends_the_training(finetune, models):
    assert finetune(models("selective"), iters=2)[0] == 0
    before = adapter()
    code, printed = finetune(models("selective"), "--learning-rate", "1e30")
    assert code == 2 and "the loss is no number; nothing more is saved" in printed
    assert same(adapter(), before)


def test_a_state_of_another_training_does_not_stay(finetune, models):
    """Which --resume would go on with, in the place of the newer weights."""
    assert finetune(models("softmax"), iters=2)[0] == 0
    flags = ["--fine-tune-type", "full", "--grad-accumulation-steps", 2]
    assert finetune(models("softmax"), *flags, iters=3)[0] == 0  # an odd one is not saved
    code, printed = finetune(models("softmax"), "--resume", iters=4)
    assert code == 2 and "training_state.safetensors: no such file" in printed
    assert config()["fine_tune_type"] == "full"


def test_data_that_changed_in_place(finetune, models, data):
    assert finetune(models("softmax"), iters=2)[0] == 0
    file = data / "train.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))
    code, printed = finetune(models("softmax"), "--resume")
    assert code == 2 and "was made with the content of train.jsonl" in printed


def test_a_model_that_changed_in_place(finetune, models, data):
    shutil.copytree(models("softmax"), "model")
    assert finetune("model", iters=2)[0] == 0
    weights = mx.load("model/model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    mx.eval(weights)
    mx.save_safetensors("model/model.safetensors", weights, {"format": "mlx"})
    code, printed = finetune("model", "--resume")
    assert code == 2 and "was made with the model's parameters" in printed


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "hi \\ud83d there"}', "does not take it"),
        ("{}", "line 10: 'text' must be text"),
        ("", "line 10 is empty; take it away"),
    ],
)
def test_an_example_that_is_none(finetune, models, data, line, message):
    with (data / "train.jsonl").open("a") as file:
        file.write(line + "\n" + json.dumps({"text": "hello"}) + "\n")
    code, printed = finetune(models("softmax"), iters=10)
    assert code == 2 and message in printed and "data/train.jsonl, line 10" in printed


def test_what_was_trained_before_such_an_example_is_saved(finetune, models, data):
    bad = '{"text": "hi \\ud83d there"}\n'
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)[:8]
    for place in range(8):  # the batches come in an order of their own
        (data / "train.jsonl").write_text("".join([*lines[:place], bad, *lines[place + 1 :]]))
        code, printed = finetune(models("softmax"), "--adapter-path", f"a{place}", iters=4)
        assert code == 2 and f"train.jsonl, line {place + 1}: " in printed
    done = [
        len(curve(f"a{place}")) for place in range(8) if os.path.exists(f"a{place}/losses.jsonl")
    ]
    assert done and all(
        os.path.exists(f"a{p}/adapters.safetensors") == os.path.exists(f"a{p}/losses.jsonl")
        for p in range(8)
    )


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 3}],
        [{"role": 1, "content": "a"}],
        ["a"],
    ],
    ids=str,
)
def test_messages_that_are_none(finetune, models, data, messages):
    line = json.dumps({"messages": messages}) + "\n"
    (data / "train.jsonl").write_text(line * 4)
    code, printed = finetune(models("softmax"))
    assert code == 2
    assert "line 1: 'messages' must be a list of objects with role and content" in printed


def test_data_without_a_form(finetune, models, data):
    (data / "train.jsonl").write_text('{"txt": "a"}\n' * 4)
    code, printed = finetune(models("softmax"))
    assert code == 2 and "train.jsonl, line 1: none of the forms it may have" in printed
    (data / "train.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    code, printed = finetune(models("softmax"))
    assert code == 2 and "begins with a byte order mark; save it without one" in printed
    (data / "train.jsonl").unlink()
    code, printed = finetune(models("softmax"))
    assert code == 2 and "--data data holds no file train.jsonl" in printed
    (data / "train.jsonl").mkdir()
    assert "holds no file train.jsonl" in finetune(models("softmax"))[1]


def test_folders_that_cannot_be_written(finetune, models, data):
    (data.parent / "file").write_text("")
    for path in ("file", "file/x"):
        code, printed = finetune(models("softmax"), "--adapter-path", path)
        assert code == 2 and f"--adapter-path {path}: " in printed and "is a file" in printed
    os.makedirs("adapters/adapter_config.json")
    code, printed = finetune(models("softmax"))
    assert code == 2 and "adapter_config.json is a folder there" in printed
    assert os.listdir("adapters") == ["adapter_config.json"]
