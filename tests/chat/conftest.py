"""Models for the chat's tests, with a small budget, and a session that records what it reads."""

import mlx.core as mx
import pytest
from mlx_lm.models import llama
from turns import BUDGET, new_session

from mlx_selective import graft, load
from mlx_selective.builtin import BUILTIN_MODEL


@pytest.fixture(scope="module")
def builtin():
    return load(BUILTIN_MODEL, BUDGET)


@pytest.fixture(scope="module")
def model(builtin):
    """Three layers of random weights, for the tokenizer of the built-in model."""
    mx.random.seed(0)
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=64,
        num_attention_heads=2,
        rms_norm_eps=1e-5,
        vocab_size=builtin[0].args.vocab_size,
    )
    return graft(llama.Model(args), {"kind": "selective", "budget": BUDGET})


@pytest.fixture
def session(model, builtin):
    return new_session(model, builtin[1])


@pytest.fixture
def builtin_session(builtin):
    return new_session(*builtin)
