"""Where mlx-lm departs from PyTorch the config decides: families.py, config_fields.py."""

from math import erf, sqrt

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tiny import grafted, present, stock, tokens

from mlx_selective import UserError

SOFTMAX = {"kind": "softmax"}
EXACT, TANH = "gelu", "gelu_approx"
#: family, fields of its config -> the GELU that mlx-lm's code calls, the one that is computed
GELUS = [
    ("gpt_neox", {"hidden_act": "gelu"}, TANH, EXACT),
    ("gpt_neox", {"hidden_act": None}, TANH, EXACT),
    ("gpt_neox", {"hidden_act": "gelu_new"}, TANH, TANH),
    ("gpt_neox", {"hidden_act": "gelu_fast"}, TANH, TANH),
    ("gpt2", {}, TANH, TANH),
    ("gpt2", {"activation_function": "gelu_new"}, TANH, TANH),
    ("gpt2", {"activation_function": "gelu_pytorch_tanh"}, TANH, TANH),
    ("gpt2", {"activation_function": "gelu"}, TANH, EXACT),
    ("gpt2", {"activation_function": "gelu_python"}, TANH, EXACT),
    ("gptj", {}, TANH, TANH),
    ("gptj", {"activation_function": "gelu"}, TANH, EXACT),
    ("phi", {}, TANH, TANH),
    ("phi", {"hidden_act": "gelu"}, TANH, EXACT),
    ("gpt_bigcode", {}, EXACT, TANH),
    ("gpt_bigcode", {"activation_function": "gelu"}, EXACT, EXACT),
    ("starcoder2", {}, EXACT, TANH),
    ("starcoder2", {"hidden_act": "gelu_pytorch_tanh"}, EXACT, TANH),
    ("starcoder2", {"hidden_act": "gelu"}, EXACT, EXACT),
    # transformers reads "gelu" in old Gemma configs as the approximation
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, EXACT, TANH),
    ("gemma", {"hidden_act": "gelu_pytorch_tanh"}, EXACT, TANH),
]


def activation(function):
    """Values of an activation on a grid."""
    return np.array(function(mx.linspace(-4, 4, 101)), np.float64)


def test_the_two_gelus_are_what_they_are_called():
    grid = np.linspace(-4, 4, 101)
    exact = np.array([x * 0.5 * (1 + erf(x / sqrt(2))) for x in grid])
    assert np.abs(activation(nn.gelu) - exact).max() < 1e-6
    assert 1e-4 < np.abs(activation(nn.gelu_approx) - exact).max() < 1e-3


@pytest.mark.parametrize(
    "family, fields, called, computed", [case for case in GELUS if present(case[:1])], ids=str
)
def test_the_gelu_is_what_the_config_says(monkeypatch, family, fields, called, computed):
    ids, model = tokens(2, 12), grafted(family, SOFTMAX, **fields)
    logits = model(ids)
    plain = stock(family)
    same = mx.array_equal(logits, plain(ids))
    assert same == (called == computed)
    monkeypatch.setattr(nn, called, getattr(nn, computed))  # mlx-lm's code looks it up in a call
    assert mx.array_equal(logits, plain(ids))
    assert type(model.layers[0]).__name__ == type(plain.layers[0]).__name__


GATED = ["llama", "mistral", "qwen2", "qwen3", "granite", "olmo2", "phi3", "mixtral", "qwen3_moe"]


@pytest.mark.parametrize("family", GATED)
def test_gated_families_compute_silu_only(family):
    ids = tokens(1, 8)
    expected = stock(family)(ids)
    for name in ("silu", "swish", None):
        assert mx.array_equal(grafted(family, SOFTMAX, hidden_act=name)(ids), expected)
    for name in ("gelu", "relu", "", 3, ["silu"]):
        with pytest.raises(UserError, match="hidden_act .* is not computed for .*silu, swish"):
            grafted(family, SOFTMAX, hidden_act=name)


@pytest.mark.parametrize(
    "family, fields, words",
    [
        ("gpt_neox", {"hidden_act": "relu"}, "hidden_act 'relu' is not computed for gpt_neox; exp"),
        ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' is not computed"),
        ("gpt2", {"activation_function": "silu"}, "expected one of gelu, gelu_python, gelu_new"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False is not computed"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx True is not"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn True is not"),
        ("gpt2", {"n_inner": 64}, "n_inner 64 is not computed for gpt2; only 4 n_embd is"),
        ("gpt2", {"tie_word_embeddings": False}, "tie_word_embeddings False is not computed"),
        ("gpt2", {"n_head": 5}, "n_embd 32 must be a multiple of n_head 5"),
        ("gpt2", {"n_layer": 0}, "n_layer must be a whole number from 1"),
        ("gpt2", {"n_positions": "512"}, "n_positions must be a whole number from 1"),
        ("gpt2", {"n_inner": 1.5}, "n_inner must be a whole number from 1"),
        ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon must be a positive number"),
        ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights must be true or false"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True is not computed for phi"),
        ("glm", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not computed"),
        ("llama", {"partial_rotary_factor": 0.5}, "only 1 is"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv 8.0 is not computed for olmoe"),
        (
            "gpt_neox",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            "rope_scaling .* only None",
        ),
        ("llama", {"layer_types": "full_attention"}, "layer_types must be a list of names"),
        ("llama", {"layer_types": [3]}, "layer_types must be a list of names"),
        ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    ],
)
def test_what_mlx_lm_would_leave_unread_is_refused(family, fields, words):
    with pytest.raises(UserError, match=words):
        grafted(family, SOFTMAX, **fields)


@pytest.mark.parametrize(
    "family, fields",
    [
        ("gpt2", {"n_inner": 128, "scale_attn_weights": True, "reorder_and_upcast_attn": False}),
        ("gpt2", {"n_inner": None, "tie_word_embeddings": True, "rope_scaling": None}),
        ("gpt_neox", {"rope_scaling": {"rope_type": "default"}}),
        ("llama", {"partial_rotary_factor": 1.0, "clip_qkv": None}),
    ],
)
def test_fields_that_ask_for_what_is_computed_anyway(family, fields):
    ids = tokens(1, 8)
    assert mx.array_equal(grafted(family, SOFTMAX, **fields)(ids), stock(family)(ids))
