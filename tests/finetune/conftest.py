"""Tiny models, a few sentences, and the command in a folder of its own."""

import json

import pytest
from tiny_checkpoints import llama

from mlx_selective.cli import main
from mlx_selective.convert import convert

SENTENCES = ["the cat sat on the mat", "a dog ran", "hello you", "it rains and rains again here"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Gives the folder of a tiny float32 model by its attention."""
    folder = tmp_path_factory.mktemp("models")
    source = llama(kv_heads=2, tied=False).save(folder / "source")

    def get(name, attention=None):
        if not (folder / name).exists():
            convert(str(source), folder / name, attention=attention or name)
        return folder / name

    return get


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty working folder but for ``data``."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "data"
    folder.mkdir()
    for part, count in (("train", 9), ("valid", 4)):
        lines = [json.dumps({"text": SENTENCES[n % 4] + " " * (n // 4)}) for n in range(count)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def finetune(data, capsys):
    """Runs the command; gives its exit code and what it printed."""

    def run(model, *flags, iters=6):
        settings = ["--iters", iters, "--batch-size", 2, "--learning-rate", "1e-2"]
        settings += ["--steps-per-report", 1, "--val-batches", 1, "--model", model]
        code = main(["finetune", "--train", "--data", "data", *map(str, [*settings, *flags])])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run
