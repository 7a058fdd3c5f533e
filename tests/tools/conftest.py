"""Tiny model folders, and each tool as its own process: mlx-lm's, and this package's."""

import json
import os
import subprocess

import pytest
from processes import BUDGET, MESSAGE, tool_command
from tiny_checkpoints import llama

from mlx_selective import generate, load
from mlx_selective.convert import convert
from mlx_selective.generation.chat_template import chat_prompt
from mlx_selective.output import safe_text


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Gives the folder of a tiny float32 model by its kind of attention, made once.

    "mixed" has selective attention in its first layer and softmax in its second.
    """
    folder = tmp_path_factory.mktemp("models")
    source = llama(kv_heads=2, tied=False).save(folder / "source")

    def get(kind: str):
        if not (folder / kind).exists():
            attention = [{"kind": "selective"}, {"kind": "softmax"}] if kind == "mixed" else kind
            budget = BUDGET if kind in ("selective", "mixed") else None
            convert(str(source), folder / kind, attention=attention, budget=budget)
        return folder / kind

    return get


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """No Hub, nobody's Hub cache, and text in UTF-8."""
    cache = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path_factory.mktemp("hub"))}
    return {**os.environ, **cache, "MLX_DISABLE_COMPILE": "1", "PYTHONUTF8": "1"}


@pytest.fixture
def run(environment, tmp_path):
    """Runs a tool in an empty folder, where it must succeed; gives what it printed."""

    def run(side: str, tool: str, *flags, typed: str = "") -> str:
        ended = subprocess.run(
            [*tool_command(side, tool), *map(str, flags)],
            input=typed.encode(),
            capture_output=True,
            cwd=tmp_path,
            env=environment,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr.decode()
        assert b"Traceback" not in ended.stderr
        return ended.stdout.decode()

    return run


@pytest.fixture(params=["stock", "ours"])
def side(request):
    """mlx-lm's tool, or this package's command of that name."""
    return request.param


@pytest.fixture(params=["selective", "stick_breaking", "mixed"])
def kind(request):
    return request.param


@pytest.fixture(scope="session")
def answer():
    """What a model answers, by the library in this process."""

    def answer(folder, message: str = MESSAGE, max_tokens: int = 6, **options) -> str:
        model, tokenizer = load(folder, **options)
        prompt = chat_prompt(tokenizer, message, None)
        return safe_text(generate(model, tokenizer, prompt, max_tokens=max_tokens))

    return answer


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder of examples to train on."""
    folder = tmp_path_factory.mktemp("data")
    lines = "".join(json.dumps({"text": f"{MESSAGE} {i}"}) + "\n" for i in range(6))
    for part in ("train", "valid", "test"):
        (folder / f"{part}.jsonl").write_text(lines)
    return folder
