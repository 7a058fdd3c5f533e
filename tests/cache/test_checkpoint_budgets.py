"""Pruned decoding of the reference model: the perplexities that PyTorch gave, budget by budget."""

import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_selective import load, make_prompt_cache

BUDGETS = ["full", "256", "128", "64", "32", "16"]
#: the others change nothing but a number
QUICK = {"64", "16"}


@pytest.fixture(scope="module")
def model(converted):
    return load(converted("llama-selective"))[0]


@pytest.fixture(scope="module")
def expected(checkpoints):
    """The stated perplexities and the documents (8, 513) they belong to."""
    folder = checkpoints / "llama-selective"
    pruned = json.loads((folder / "expected.json").read_text())["pruned"]
    arrays = np.load(folder / "expected.npz")
    documents = [arrays[f"doc_{i}"][: pruned["tokens"] + 1] for i in pruned["doc_index"]]
    return pruned["perplexity"], np.stack(documents).astype(np.int32)


def perplexity(model, documents, budget):
    """Token by token; the documents are the rows of a batch, each pruned on its own."""
    ids, cache = mx.array(documents), make_prompt_cache(model, budget)
    loss = mx.array(0.0)
    for i in range(ids.shape[1] - 1):
        logits = model(ids[:, i : i + 1], cache=cache)[:, 0]
        right = mx.take_along_axis(logits, ids[:, i + 1 : i + 2], axis=1)[:, 0]
        loss = loss + (mx.logsumexp(logits, axis=-1) - right).sum()
        mx.eval(loss, [c.state for c in cache])
    return float(np.exp(loss.item() / documents[:, 1:].size)), cache


@pytest.mark.parametrize(
    "budget", [pytest.param(b, marks=() if b in QUICK else pytest.mark.slow) for b in BUDGETS]
)
def test_perplexity(budget, model, expected):
    stated, documents = expected
    assert set(stated) == set(BUDGETS)
    limit = None if budget == "full" else int(budget)
    found, cache = perplexity(model, documents, limit)
    assert found == pytest.approx(stated[budget], rel=1e-3)
    kept = limit or 512
    assert all((c.size(), c.offset) == (kept, 512) for c in cache)
    slots = limit + 1 if limit else 512
    assert sum(c.nbytes for c in cache) == 8 * 8 * slots * (2 * 6 * 64 * 4 + 8)


def test_one_row_alone_is_the_same(model, expected):
    """A single conversation, as a chat decodes it, gives the row's numbers."""
    _, documents = expected
    together, _ = perplexity(model, documents[:2, :129], 16)
    alone = [perplexity(model, documents[row : row + 1, :129], 16)[0] for row in range(2)]
    assert together == pytest.approx(np.sqrt(alone[0] * alone[1]), rel=1e-5)
