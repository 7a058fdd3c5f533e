"""Real models through the kernels: the plain path's tokens, and the perplexities of PyTorch."""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from place import ON_GPU, graphs_kept, launching
from test_checkpoint_budgets import perplexity

from mlx_selective import load, make_prompt_cache
from mlx_selective.kernels import record

MODELS = {
    "llama-selective": {"selective_mask", "selective_attention", "selective_decode"},
    "dolomite-stickbreaking": {"stick_breaking_attention", "stick_breaking_decode"},
}
#: tokens of the prompt, tokens generated; few where the processor stands for a GPU
LENGTHS = (700, 300) if ON_GPU else (20, 4)


def greedy(model, prompt, budget):
    """The tokens that follow, always the likeliest."""
    cache = make_prompt_cache(model, budget)
    steps = generate_step(prompt, model, max_tokens=LENGTHS[1], prompt_cache=cache)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    "name, budget",
    [("llama-selective", None), ("llama-selective", 12), ("dolomite-stickbreaking", None)],
)
def test_greedy_tokens_are_the_plain_paths(name, budget, converted, checkpoints, monkeypatch):
    model = load(converted(name))[0]
    assert model.layers[0].self_attn.q_proj.weight.dtype == mx.float32
    arrays = np.load(checkpoints / name / "expected.npz")
    document = max((arrays[name] for name in arrays if name.startswith("doc_")), key=len)
    prompt = mx.array(document[: LENGTHS[0]].astype(np.int32))
    with launching(), record() as ran:
        tokens = greedy(model, prompt, budget)
    assert MODELS[name] <= {one.kernel for one in ran if one.backend}
    assert not [one for one in ran if one.backend is None and "attention" in one.kernel]
    if ON_GPU:  # nobody watches
        with graphs_kept():
            assert tokens == greedy(model, prompt, budget)
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    assert tokens == greedy(model, prompt, budget)


@pytest.mark.skipif(not ON_GPU, reason="thousands of launches, for a GPU")
@pytest.mark.parametrize("budget", ["full", "64", "16"])
def test_perplexities_token_by_token(budget, converted, checkpoints):
    folder = checkpoints / "llama-selective"
    stated = json.loads((folder / "expected.json").read_text())["pruned"]
    arrays = np.load(folder / "expected.npz")
    documents = [arrays[f"doc_{i}"][: stated["tokens"] + 1] for i in stated["doc_index"]]
    model = load(converted("llama-selective"))[0]
    with record() as ran:
        found, _ = perplexity(
            model, np.stack(documents).astype(np.int32), None if budget == "full" else int(budget)
        )
    assert "selective_decode" in {one.kernel for one in ran if one.backend}
    assert found == pytest.approx(stated["perplexity"][budget], rel=1e-3)


@pytest.mark.skipif(not ON_GPU, reason="whole documents, for a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_perplexity_of_whole_documents(name, converted, checkpoints):
    """Each read at once, as a prompt is."""
    folder = checkpoints / name
    stated = json.loads((folder / "expected.json").read_text())
    arrays = np.load(folder / "expected.npz")
    model, losses = load(converted(name))[0], []
    with record() as ran:
        for index in range(len(stated["documents"])):
            ids = mx.array(arrays[f"doc_{index}"].astype(np.int32))[None]
            logits = model(ids[:, :-1]).astype(mx.float32)
            right = mx.take_along_axis(logits, ids[:, 1:, None], axis=2)[..., 0]
            losses.append((mx.logsumexp(logits, axis=-1) - right).mean().item())
    assert MODELS[name] & {one.kernel for one in ran if one.backend}
    expected = [document["nll"] for document in stated["documents"]]
    assert np.abs(np.array(losses) - expected).max() < 1e-4
