"""mlx-selective budget on tiny models: what it stores, draws, and refuses."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest
from feeding import feed
from tiny_checkpoints import llama

from mlx_selective import load, make_prompt_cache
from mlx_selective.budget import command as module
from mlx_selective.budget import mean_loss
from mlx_selective.cli import main
from mlx_selective.convert import convert

WORDS = "the cat sat on a mat and it rains again here where dogs ran hello you".split()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return llama(kv_heads=2, tied=False).save(tmp_path_factory.mktemp("models") / "source")


@pytest.fixture
def folder(source, tmp_path, monkeypatch):
    """A converted selective model, and six documents of which five are long enough."""
    monkeypatch.chdir(tmp_path)
    convert(str(source), tmp_path / "model", attention="selective")
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(WORDS, count)) for count in (40, 40, 3, 40, 40, 40)]
    text = "".join(json.dumps({"text": line}) + "\n" for line in lines)
    (tmp_path / "text.jsonl").write_text(text)
    return tmp_path / "model"


@pytest.fixture
def budget(folder, capsys):
    """Runs the command; gives its exit code and what it printed."""

    def run(*flags, data="text.jsonl", model="model"):
        arguments = ["budget", "--model", model, "--data", data, "--tokens", 24, *flags]
        code = main(list(map(str, arguments)))
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def config(folder="model"):
    return json.loads(open(f"{folder}/config.json").read())


@pytest.mark.parametrize("chunk", [1, 5])
def test_the_loss_is_that_of_a_pruned_cache(folder, chunk):
    model, _ = load(folder)
    ids = mx.random.randint(0, 60, (3, 21))
    chunks = [chunk] * (20 // chunk)
    for budgets in ([3, 9], [20, 2], 4, None):
        logits = feed(model, ids[:, :-1], chunks, make_prompt_cache(model, budgets))[0]
        right = mx.take_along_axis(logits, ids[:, 1:, None], axis=2)[..., 0]
        expected = (mx.logsumexp(logits, axis=-1) - right).mean().item()
        assert mean_loss(model, ids, budgets, chunk=chunk, batch_size=2) == pytest.approx(
            expected, rel=1e-5
        )
    assert model.attention.budget is None


def test_budgets_are_stored_with_their_curve(budget):
    code, printed = budget("--max-loss", "2%")
    assert code == 0
    curve = json.loads(open("model/budgets.json").read())
    points = curve["curve"]
    assert points[0]["budgets"] == [24, 24] and points[0]["kept"] == 1
    assert all(p["perplexity"] <= 1.02 * points[0]["perplexity"] * (1 + 1e-9) for p in points)
    chosen = config()["attention"]["budget"]
    assert chosen == points[-1]["budgets"] and sum(chosen) < 40
    assert f"Budgets: {' '.join(map(str, chosen))}" in printed
    assert [row["way"] for row in curve["report"]][1] == "budgets of each layer"
    # what is reported is of the other documents
    model, tokenizer = load("model")
    lines = [json.loads(line)["text"] for line in open("text.jsonl")]
    encoded = [tokenizer.encode(lines[n])[:25] for n in (1, 4)]  # the third is too short
    expected = math.exp(mean_loss(model, mx.array(encoded), chosen))
    assert curve["report"][1]["perplexity"] == pytest.approx(expected, rel=1e-6)
    assert open("model/budgets.png", "rb").read(8) == b"\x89PNG\r\n\x1a\n"
    # the model opens with them
    assert [cache.budget for cache in make_prompt_cache(model)] == chosen


def test_a_copy_is_stored_elsewhere(budget):
    before = config()
    assert budget("--mlx-path", "copy")[0] == 0
    assert config() == before and isinstance(config("copy")["attention"]["budget"], list)
    code, printed = budget("--mlx-path", "copy")
    assert code == 2 and "--mlx-path copy exists already" in printed


def test_ctrl_c_stores_what_was_found(budget, monkeypatch):
    class Raised(module.InterruptFlag):
        def __enter__(self):
            super().__enter__()
            self.raised = True
            return self

    monkeypatch.setattr(module, "InterruptFlag", Raised)
    code, printed = budget("--max-loss", "5%")
    assert code == 0 and "Stopped here" in printed
    assert len(json.loads(open("model/budgets.json").read())["curve"]) == 2


@pytest.mark.parametrize(
    "data, flags, message",
    [
        ("nowhere", [], "--data nowhere: no such file or folder"),
        (".", [], "holds neither valid.jsonl nor test.jsonl"),
        ("text.jsonl", ["--tokens", 300], "0 of 6 documents have more than 300 tokens"),
        ("bad.jsonl", [], "bad.jsonl, line 1: not JSON"),
        (
            "other.jsonl",
            [],
            "other.jsonl, line 1: none of the forms it may have: prompt and completion;",
        ),
        ("chat.jsonl", [], "chat.jsonl: "),
    ],
)
def test_text_that_cannot_be_used(budget, folder, data, flags, message):
    (folder.parent / "bad.jsonl").write_text("{\n")
    (folder.parent / "other.jsonl").write_text('{"words": "a"}\n')
    (folder.parent / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    code, printed = budget(*flags, data=data)
    assert code == 2 and message in printed and printed.count("error:") == 1
    assert "budget" not in config()["attention"] or config()["attention"]["budget"] is None


@pytest.mark.parametrize("share", ["x", "-1%", "nan", "2000%"])
def test_a_share_that_is_none(budget, share):
    with pytest.raises(SystemExit) as end:
        budget(f"--max-loss={share}")
    assert end.value.code == 2


def test_other_attention_is_refused(budget, source, folder):
    convert(str(source), folder.parent / "softmax", attention="softmax")
    code, printed = budget(model="softmax")
    assert code == 2 and "need a model with selective attention in all layers" in printed
