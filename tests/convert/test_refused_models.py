"""A model folder with something wrong in it: generate and chat end in one line that names it."""

import subprocess
import sys

import numpy as np
import pytest
from damage import (
    EVIL,
    both,
    config,
    cut,
    files,
    model_with_code,
    one_line,
    remove,
    sizes,
    tensors,
    text,
    tokenizer_with_code,
)
from tiny_checkpoints import llama

from mlx_selective.cli import main
from mlx_selective.convert import convert

NORM = "model.norm.weight"


def attention(**fields):
    return config(attention=fields)


MODELS = {
    "no config": (remove("config.json"), "config.json: no such file"),
    "config no JSON": (text("config.json", "{"), "config.json is not readable JSON"),
    "config no object": (text("config.json", "[]"), "config.json must hold a JSON object"),
    "deep config": (text("config.json", "[" * 100_000), "config.json is not readable JSON"),
    "no weights": (remove("model.safetensors"), "no model*.safetensors"),
    "cut weights": (cut("model.safetensors", 0.5), "model.safetensors"),
    "cut weights header": (cut("model.safetensors", 0.001), "model.safetensors"),
    "missing tensor": (tensors({NORM: None}), "model.norm.weight"),
    "unknown tensor": (tensors({"visual.proj": np.ones(3, np.float32)}), "visual.proj"),
    "wrong shape": (tensors({NORM: np.ones(65, np.float32)}), "model.norm.weight"),
    "no kind": (attention(budget=64), "attention must be an object", "budget"),
    "no attention": (config(attention=None), "attention must be an object"),
    "unknown kind": (attention(kind="linear"), "attention.kind 'linear' is unknown", "selective"),
    "kind a list": (attention(kind=["ssa"]), "attention.kind ['ssa'] is unknown"),
    "unknown field": (attention(kind="selective", window=3), "attention.window", "selective"),
    "budget 1": (attention(kind="selective", budget=1), "budget must be at least 2", "1"),
    "budget per layer": (attention(kind="selective", budget=[8]), "attention.budget lists 1"),
    "wrong base": (config(base_model_type="gemma9"), "base_model_type", "'gemma9'"),
    "no base": (config(base_model_type=None), "base_model_type", "None"),
    "missing field": (config(hidden_size=None), "hidden_size"),
    **sizes("num_hidden_layers"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "cannot be loaded"),
    "cut tokenizer": (cut("tokenizer.json", 0.5), "tokenizer.json"),
    "damaged tokenizer": (text("tokenizer.json", '{"model": {}}'), "cannot be loaded"),
    "stock model with code": (model_with_code(), "evil.py"),
    "tokenizer with code": (tokenizer_with_code(), "custom code"),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A small softmax model's files, by name."""
    folder = tmp_path_factory.mktemp("opened")
    model = convert(str(llama().save(folder / "source")), folder / "model")
    return {path.name: path.read_bytes() for path in model.iterdir()}


@pytest.fixture
def model(opened, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in opened.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(params=["generate", "chat"])
def not_opened(request, capfd, monkeypatch):
    """Runs generate or chat; gives the line that refuses the model."""
    # chat asks nothing of an input that is no terminal.
    monkeypatch.setattr("sys.stdin", open("/dev/null", encoding="utf-8"))

    def run(folder, *flags) -> str:
        assert main([request.param, "--model", str(folder), *flags]) == 2
        return one_line(capfd, request.param)

    return run


@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_model(not_opened, model, name):
    damage, *words = MODELS[name]
    damage(model)
    line = not_opened(model)
    assert str(model) in line and all(word in line for word in words), line
    assert not (model / "executed").exists()


@pytest.mark.parametrize(
    "path", ["no/such/folder", "./nothing", "nothing", "~nobody/x/y", "a" * 300]
)
def test_a_model_that_is_nothing(not_opened, path):
    assert f"{path}: no such folder" in not_opened(path)


def test_adapters_that_are_not_there(not_opened, model, tmp_path):
    line = not_opened(model, "--adapter-path", str(tmp_path / "adapters"))
    assert str(tmp_path / "adapters") in line


def test_a_budget_for_softmax(not_opened, model):
    line = not_opened(model, "--budget", "64")
    assert "a budget needs a model with selective attention" in line and "softmax" in line


def test_a_budget_that_is_too_small(not_opened, model):
    attention(kind="selective")(model)
    assert "budget must be at least 2" in not_opened(model, "--budget", "1")


def test_the_file_for_stock_mlx_lm_is_not_run(model, capfd):
    both(config(model_file="evil.py"), text("evil.py", EVIL))(model)
    assert main(["generate", "--model", str(model), "--max-tokens", "2"]) == 0
    assert not (model / "executed").exists()


def test_the_commands_for_real(tmp_path):
    environment = {"HF_HUB_OFFLINE": "1"}
    for arguments in (
        ["convert", "--hf-path", "nobody-here/nothing", "--mlx-path", str(tmp_path / "model")],
        ["generate", "--model", "nobody-here/nothing"],
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "mlx_selective", *arguments],
            capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        start = f"mlx-selective {arguments[0]}: error: nobody-here/nothing: no such folder"
        assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
        assert ended.stderr.startswith(start)
    assert files(tmp_path) == {}
