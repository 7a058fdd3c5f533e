"""The built-in model is what its README says it is."""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_selective import load
from mlx_selective.builtin import BUILTIN_MODEL
from mlx_selective.convert import convert

README = (BUILTIN_MODEL / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def fresh(checkpoints, tmp_path_factory):
    """The checkpoint converted as the README says."""
    return convert(
        checkpoints / "llama-selective",
        tmp_path_factory.mktemp("fresh") / "model",
        attention="selective",
        budget=128,
        quantize=True,
        dtype="float32",
    )


def test_is_small_enough_to_ship():
    assert sum(file.stat().st_size for file in BUILTIN_MODEL.iterdir() if file.is_file()) < 12e6


def test_is_the_conversion_that_its_readme_names(fresh):
    """Byte for byte: weights, config and tokenizer."""
    assert "convert -q --dtype float32 --attention selective --budget 128" in README
    for file in fresh.iterdir():
        assert file.read_bytes() == (BUILTIN_MODEL / file.name).read_bytes(), file.name


def test_names_every_source_of_its_training_text(checkpoints):
    table = (checkpoints.parent / "data" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!kind|---)\w+ \| (.*?) \| (.*?) \|", table, re.M)
    assert len(rows) == 11
    for source, licence in rows:
        # FairytaleQA's tales and questions share a row there
        name = source.split(" (")[0].replace("FairytaleQA tales", "FairytaleQA")
        (line,) = [x for x in README.splitlines() if name.split(" questions")[0] in x and "|" in x]
        assert licence in line


@pytest.mark.slow
def test_perplexities_are_those_of_its_readme(converted, checkpoints):
    """The first four held-out documents, read whole with every key kept."""
    arrays = np.load(checkpoints / "llama-selective" / "expected.npz")
    for folder, row in ((converted("llama-selective"), "float32"), (BUILTIN_MODEL, "4 bits")):
        model, _ = load(folder)
        losses = []
        for i in range(4):
            ids = mx.array(arrays[f"doc_{i}"].astype(np.int32))
            logits = model(ids[None, :-1])[0]
            right = mx.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]
            losses.append(np.array(mx.logsumexp(logits, axis=-1) - right))
        found = np.exp(np.concatenate(losses).mean())
        stated = float(re.search(rf"\| {row} \| ([\d.]+) \|", README).group(1))
        assert found == pytest.approx(stated, abs=0.05)
