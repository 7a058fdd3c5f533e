"""A user's mistake, or a folder that carries code: one line, exit code 2, nothing run."""

import os
import shutil
import signal
import socket
import subprocess
import time

import mlx.core as mx
import pytest
from damage import (
    EVIL,
    both,
    config,
    files,
    model_with_code,
    one_line,
    remove,
    text,
    tokenizer_with_code,
)
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from processes import tool_command
from tiny_checkpoints import write_json

from mlx_selective import load
from mlx_selective.cli import main

#: What is not refused may be served, or trained, for ever.
pytestmark = pytest.mark.timeout(90)

BUILDS_A_MODEL = f"{EVIL}from mlx_selective.model import Model, ModelArgs\n"
TRAIN = ["lora", "--model", "model", "--train", "--data", "data", "--adapter-path", "new"]
TRAIN += ["--batch-size", "1", "--iters", "1", "--num-layers", "1"]
CACHE = ["cache_prompt", "--model", "model", "--prompt", "hello", "--prompt-cache-file", "saved"]
TOOLS = {
    "lora": TRAIN,
    "fuse": ["fuse", "--model", "model", "--save-path", "fused"],
    "server": ["server", "--model", "model", "--port", "0"],
    "benchmark": ["benchmark", "--model", "model", "-p", "4", "-g", "2", "-n", "1"],
    "cache_prompt": CACHE,
}
MODELS = {
    "no folder": (shutil.rmtree, "model: no such folder"),
    "no config": (remove("config.json"), "model/config.json: no such file"),
    "config no JSON": (text("config.json", "{"), "model/config.json is not readable JSON"),
    "no attention": (config(attention=None), "model: attention must be an object"),
    "cut weights": (text("model.safetensors", "cut"), "model/model.safetensors is not a whole"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "model cannot be loaded"),
    "code": (model_with_code(BUILDS_A_MODEL), "evil.py"),
    "tokenizer code": (tokenizer_with_code(), "custom code"),
}


@pytest.fixture
def folder(models, data, tmp_path, monkeypatch):
    """A folder to work in: copies of a model and of data, an adapter that changes nothing."""
    shutil.copytree(models("selective"), tmp_path / "model")
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "adapters").mkdir()
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0}
    settings = {"num_layers": 1, "fine_tune_type": "lora", "lora_parameters": parameters}
    write_json(tmp_path / "adapters" / "adapter_config.json", settings)
    model, _ = load(models("selective"))
    linear_to_lora_layers(model, 1, parameters)
    weights = {n: v for n, v in tree_flatten(model.parameters()) if ".lora_" in n}
    mx.save_safetensors(str(tmp_path / "adapters" / "adapters.safetensors"), weights)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


@pytest.fixture
def refused(folder, capfd):
    """Runs a command that must fail; gives its line."""

    def refused(*arguments: str) -> str:
        try:
            code = main(list(arguments))
        except SystemExit as exit_:
            code = exit_.code
        assert code == 2
        return one_line(capfd, arguments[0])

    return refused


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("damage", MODELS)
def test_a_model_that_cannot_be_opened(refused, folder, tool, damage):
    do, words = MODELS[damage]
    do(folder / "model")
    before = files(folder)
    assert words in refused(*TOOLS[tool])
    shutil.rmtree(folder / "hub", ignore_errors=True)  # the server makes it
    assert files(folder) == before


@pytest.mark.parametrize("tool", ["lora", "fuse", "benchmark", "cache_prompt"])
def test_no_code_of_our_folders_is_run(folder, tool):
    """Whoever trusts it."""
    both(config(model_file="evil.py"), text("evil.py", EVIL))(folder / "model")
    assert main([*TOOLS[tool], "--trust-remote-code"]) == 0
    assert not (folder / "model" / "executed").exists()


def test_code_of_another_folder_is_run_where_the_user_trusts_it(folder):
    MODELS["code"][0](folder / "model")
    assert main([*TOOLS["benchmark"], "--trust-remote-code"]) == 0
    assert (folder / "model" / "executed").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lora", "--model", "model", "--data", "data"], "at least one of --train or --test"),
        ([*TRAIN, "--data", "nowhere"], "--data nowhere: no such folder"),
        ([*TRAIN, "--data", "data/train.jsonl"], "data/train.jsonl is a file; give the folder"),
        ([*TRAIN, "--data", "model"], "--data model holds no file train.jsonl"),
        ([*TRAIN, "--num-layers", "16"], "train 16 layers but the model only has 2"),
        ([*TRAIN, "--batch-size", "7"], "batch_size=7 examples but only has 6"),
        ([*TRAIN, "--iters", "0"], "--iters must be at least 1, got 0"),
        ([*TRAIN, "--iters", "x"], "argument --iters: invalid int value: 'x'"),
        ([*TRAIN, "--nope"], "unrecognized arguments: --nope"),
        ([*TRAIN, "--mask-prompt"], "Prompt masking not supported for text dataset"),
        ([*TRAIN, "--resume-adapter-file", "no.safetensors"], "no.safetensors"),
        ([*TRAIN, "--adapter-path", "data/train.jsonl"], "data/train.jsonl"),
        ([*TRAIN, "--report-to", "swanlab"], "swanlab is not installed"),
        ([*TRAIN, "--config", "no.yaml"], "no.yaml"),
        ([*TRAIN, "--config", "data/train.jsonl"], "data/train.jsonl"),
        (["lora", "--model", "model", "--data", "data", "--test", "--adapter-path", "x"], "x: no"),
        ([*TOOLS["fuse"], "--adapter-path", "nowhere"], "nowhere: no adapter of this model"),
        ([*TOOLS["fuse"], "--adapter-path", "model"], "model: no adapter of this model"),
        ([*TOOLS["fuse"], "--save-path", "data/train.jsonl"], "data/train.jsonl"),
        ([*TOOLS["fuse"], "--save-path", "data/../model/"], "--save-path is the folder of --model"),
        ([*CACHE, "--kv-bits", "8"], "leave out kv_bits"),
        ([*TOOLS["server"], "--port", "99999999"], "--port must be from 0 to 65535"),
        ([*TOOLS["server"], "--host", "no.invalid"], "--host no.invalid --port 0: "),
        ([*TOOLS["server"], "--adapter-path", "nowhere"], "nowhere: no adapter of this model"),
        ([*TOOLS["benchmark"], "-n", "0"], "--num-trials must be at least 1, got 0"),
        ([*TOOLS["benchmark"], "-g", "0"], "--generation-tokens must be at least 1, got 0"),
        (CACHE[:-2], "the following arguments are required: --prompt-cache-file"),
        ([*CACHE, "--prompt-cache-file", "no/where"], "no/where"),
        ([*CACHE, "--adapter-path", "nowhere"], "nowhere: no adapter of this model"),
    ],
)
def test_flags_that_cannot_be(refused, arguments, words):
    assert words in refused(*arguments)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "train.jsonl holds no examples"),
        ('{"text": "a"}\nhello\n', "train.jsonl, line 2: not JSON"),
        ('{"text": "a"}\n\n', "train.jsonl, line 2 is empty; take it away"),
        ('{"text": "a"}\n["a"]\n', "train.jsonl, line 2: not a JSON object"),
        ('{"text": "a"}\n{"test": "a"}\n', "train.jsonl, line 2: 'text' must be text"),
        ('{"text": 5}\n', "train.jsonl, line 1: 'text' must be text"),
        ('{"prompt": "a", "completion": ""}\n', "line 1: 'completion' must be text"),
        ('{"messages": [1]}\n', "line 1: 'messages' must be a list of objects"),
        ('{"other": "a"}\n', "train.jsonl, line 1: none of the forms it may have"),
    ],
)
def test_data_that_is_damaged(refused, folder, lines, words):
    (folder / "data" / "train.jsonl").write_text(lines)
    assert words in refused(*TRAIN)
    assert not (folder / "new").exists()


@pytest.mark.parametrize("content", ["", "- 1\n", "text\n"])
def test_settings_that_are_none(refused, folder, content):
    (folder / "settings.yaml").write_text(content)
    line = refused(*TRAIN, "--config", "settings.yaml")
    assert "--config settings.yaml must hold lines of the form name: value" in line


def test_a_port_that_is_taken(refused):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = refused(*TOOLS["server"], "--port", port)
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in line


# Prompt caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--prompt-cache-file", "nowhere"], "--prompt-cache-file nowhere: no such file"),
        (["--prompt-cache-file", "model"], "--prompt-cache-file model: no such file"),
        (["--prompt-cache-file", "model/config.json"], "config.json is not a whole safetensors"),
        (["--prompt-cache-file", "model/model.safetensors"], "is no prompt cache"),
        (["--prompt-cache-file", "saved", "--model", "other"], "with --model model, not other"),
        (["--prompt-cache-file", "saved", "--budget", "4"], "--budget: the prompt of"),
        (["--prompt-cache-file", "saved", "--system-prompt", "x"], "--system-prompt: the prompt"),
    ],
)
def test_a_prompt_cache_that_cannot_be_used(refused, flags, words):
    assert main(CACHE) == 0
    assert words in refused("generate", "--prompt", "you", *flags)


def test_a_prompt_cache_that_is_cut(refused, folder):
    assert main(CACHE) == 0
    saved = folder / "saved.safetensors"
    saved.write_bytes(saved.read_bytes()[:-9])
    line = refused("generate", "--prompt-cache-file", "saved")
    assert "saved.safetensors is not a whole safetensors file" in line


@pytest.mark.parametrize("kind", ["stick_breaking", "gone"])
def test_a_prompt_cache_of_a_model_that_changed(refused, folder, models, kind):
    assert main(CACHE) == 0
    shutil.rmtree(folder / "model")
    words = "model: no such folder"
    if kind != "gone":
        shutil.copytree(models(kind), folder / "model")
        words = "saved.safetensors does not fit the model model; save it again"
    assert words in refused("generate", "--prompt-cache-file", "saved")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("positions", lambda a: a[:, :0]),
        ("positions", lambda a: a * 1000),
        ("positions", lambda a: a - 5),
        ("F", lambda a: a[:, :0]),
        ("F", lambda a: a * float("nan")),
        ("hole", lambda a: a[:0] + 1 if a.size else mx.array([[1000]])),
        ("offsets", lambda a: a[:0]),
        ("offsets", lambda a: a + 7),
        ("kept", lambda a: a[:0]),
        ("kept", lambda a: a - 5),
        ("budget", lambda a: a - 100),
    ],
)
def test_a_prompt_cache_whose_parts_do_not_agree(refused, folder, name, change):
    assert main(CACHE) == 0
    arrays, metadata = mx.load("saved.safetensors", return_metadata=True)
    parts = ("keys", "values", "positions", "F", "hole", "offsets", "kept", "budget")
    key = f"0.{parts.index(name)}"
    arrays[key] = change(arrays[key])
    mx.save_safetensors("saved.safetensors", arrays, metadata)
    line = refused("generate", "--prompt-cache-file", "saved")
    assert "saved.safetensors does not fit the model" in line


@pytest.mark.parametrize(
    "settings",
    [
        "lora_parameters: 5",
        "lora_parameters: {rank: 8}",
        "lr_schedule: 5",
        "optimizer_config: {adam: {nope: 1}}",
        "optimizer: 5",
        "seed: x",
    ],
)
def test_settings_of_a_wrong_type(refused, folder, settings):
    text("settings.yaml", settings)(folder)
    assert refused(*TRAIN, "--config", "settings.yaml")


# The user's own end -------------------------------------------------------------------------------


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_that_is_ended(folder, environment, sent, code):
    command = [*tool_command("ours", "lora"), *TRAIN[1:], "--iters", "1000000"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environment, "PYTHONFAULTHANDLER": "1"},
    )
    deadline = time.monotonic() + 60
    while not os.path.exists("new/adapter_config.json"):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.3)
    process.send_signal(sent)
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it then says where it stands
        pytest.fail(process.communicate()[1].decode())
    assert process.returncode == code
    assert b"Traceback" not in errors
    assert (b"\nmlx-selective lora: interrupted.\n" in errors) == (sent == signal.SIGINT)
