"""The reference checkpoints, converted, give PyTorch's logits and losses."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import sentencepiece

from mlx_selective import load

NAMES = ("llama-selective", "llama-softmax", "dolomite-stickbreaking", "neox-ssa")
LLAMAS = NAMES[:2]


@pytest.fixture(scope="module", params=NAMES)
def reference(request, checkpoints, converted):
    """A converted model in float32, and what PyTorch gave."""
    model, _ = load(converted(request.param))
    folder = checkpoints / request.param
    return (
        model,
        np.load(folder / "expected.npz"),
        json.loads((folder / "expected.json").read_text()),
    )


@pytest.mark.parametrize("text", [0, 1])
def test_logits(reference, text):
    model, arrays, _ = reference
    ids, expected = arrays[f"ids_{text}"], arrays[f"logits_{text}"]
    logits = np.array(model(mx.array(ids)[None])[0])
    assert logits.dtype == np.float32
    assert np.abs(logits - expected).max() < 2e-4
    second, first = np.sort(expected, axis=-1)[:, -2:].T
    clear = first - second > 1e-3
    assert clear.sum() > 50
    assert np.array_equal(logits.argmax(axis=-1)[clear], expected.argmax(axis=-1)[clear])


@pytest.mark.parametrize("count", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_losses_of_documents(reference, count):
    model, arrays, record = reference
    documents = record["documents"]
    assert len(documents) == 24
    for number, document in enumerate(documents[:count]):
        ids = mx.array(arrays[f"doc_{number}"])
        losses = nn.losses.cross_entropy(model(ids[None, :-1])[0], ids[1:])
        assert losses.size == document["tokens"]
        assert losses.mean().item() == pytest.approx(document["nll"], abs=1e-4), number


CHATS = {
    "one message": ["Hi there!"],
    "turns": ["What is 2 + 2?", "It is 4.", "Thank you.\n\n  And <s>?"],
    "unusual": [" Café — 日本語 😀\t", "<|end|> or </s>", ""],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", LLAMAS)
def test_chats_have_the_ids_of_sentencepiece(checkpoints, converted, name, chat):
    _, tokenizer = load(converted(name), lazy=True)
    own = sentencepiece.SentencePieceProcessor(str(checkpoints / name / "tokenizer.model"))
    roles = ["user", "assistant"] * 2
    messages = [{"role": r, "content": c} for r, c in zip(roles, CHATS[chat], strict=False)]
    rendered = "".join(f"<|{m['role']}|>\n{m['content']}<|end|>\n" for m in messages)
    assert tokenizer.apply_chat_template(messages) == [1, *own.encode(rendered)]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt == [1, *own.encode(rendered + "<|assistant|>\n")]
    assert tokenizer.eos_token_ids == {own.piece_to_id("<|end|>")}


@pytest.mark.parametrize("name", NAMES)
def test_the_config_tells_what_was_trained(converted, name):
    config = json.loads((converted(name) / "config.json").read_text())
    kinds = dict(zip(NAMES, ("selective", "softmax", "stick_breaking", "ssa"), strict=True))
    assert config["attention"]["kind"] == kinds[name]
    assert config["eos_token_id"] == (5 if name in LLAMAS else 4)
