"""Tiny random models of each family, stock and grafted, with the same weights."""

import importlib

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_selective.model import Model, ModelArgs

VOCABULARY = 97

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}

CONFIGS = {
    "llama": LLAMA,
    "granite": {
        **LLAMA,
        "logits_scaling": 1.5,
        "attention_multiplier": 0.3,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.6,
        "max_position_embeddings": 512,
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "layer_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "hidden_act": "gelu_new",  # what mlx-lm computes
    },
}

ATTENTIONS = {
    "softmax": {"kind": "softmax"},
    "selective": {"kind": "selective"},
    "selective, pruned": {"kind": "selective", "budget": 9},
    "ssa": {"kind": "ssa"},
    "ssa, released form": {"kind": "ssa", "position_form": "beta", "token_aware": False},
    "stick_breaking": {"kind": "stick_breaking"},
    "stick_breaking, current": {"kind": "stick_breaking", "attend_current": True},
}


def stock(family: str, seed: int = 0):
    """mlx-lm's own model, every weight random and large enough to matter."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    args = module.ModelArgs.from_dict({**CONFIGS[family], "model_type": family})
    return randomise(module.Model(args), seed)


def grafted(family: str, attention: dict, seed: int = 0, **config):
    """The mlx_selective model of the same weights (its temperatures are random too)."""
    model = Model(
        ModelArgs({**CONFIGS[family], "base_model_type": family, "attention": attention, **config})
    )
    return randomise(model, seed)


def randomise(model, seed: int):
    """Weights by name, so that a stock and a grafted model of one seed agree."""
    weights = []
    for name, value in tree_flatten(model.parameters()):
        key = mx.random.key(hash_name(name) + seed)
        noise = mx.random.normal(value.shape, key=key) * (0.02 if "temperature" in name else 0.3)
        weights.append((name, value + noise if "norm" in name else noise))
    model.load_weights(weights)
    model.eval()
    return model


def hash_name(name: str) -> int:
    """A number from a name that is the same in every process."""
    return int.from_bytes(name.encode()[-6:], "big") % 2**31


def tokens(batch: int, length: int, seed: int = 0) -> mx.array:
    """Random token ids (batch, length)."""
    return mx.random.randint(0, VOCABULARY, (batch, length), key=mx.random.key(seed))
