"""Tiny random models of each family, stock and grafted, with the same weights."""

import importlib
import zlib
from collections.abc import Iterable
from importlib.util import find_spec

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.utils import MODEL_REMAPPING
from tiny_families import MORE, SHARED, VOCABULARY

from mlx_selective.grafting.attention_code import calls_attention
from mlx_selective.model import Model, ModelArgs

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
}
_MULTIPLIERS = {
    "logits_scaling": 1.5,
    "attention_multiplier": 0.3,
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.6,
}
_BIASES = {"attention_bias": False, "mlp_bias": False}
_ROPE = {"rope_theta": 10000.0, "max_position_embeddings": 512}
_GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "n_ctx": 512, "n_positions": 512}

#: families of the full matrix (test_matrix.py): a new one is a line here. Configs as on the Hub.
CONFIGS = {
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": None},
    "qwen2": {**LLAMA, "use_sliding_window": False, "sliding_window": 4, "rope_theta": 1e6},
    "qwen3": {**LLAMA, **_ROPE, "head_dim": 12, "tie_word_embeddings": False},  # 12 is not 32 / 4
    "granite": {**LLAMA, **_ROPE, **_BIASES, **_MULTIPLIERS},
    "olmo2": LLAMA,
    "phi3": {**LLAMA, "partial_rotary_factor": 0.5, "sliding_window": 512, **_ROPE},
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
    "gpt2": {**_GPT2, "layer_norm_epsilon": 1e-5, "vocab_size": VOCABULARY},
}

#: methods of the full matrix
ATTENTIONS = {
    "softmax": {"kind": "softmax"},
    "selective": {"kind": "selective"},
    "selective, pruned": {"kind": "selective", "budget": 9},
    "ssa": {"kind": "ssa"},
    "ssa, released form": {"kind": "ssa", "position_map": "beta", "token_map": "none"},
    "ssa, keys": {"kind": "ssa", "key": True, "token_map": "mlp"},
    "stick_breaking": {"kind": "stick_breaking"},
    "stick_breaking, current": {"kind": "stick_breaking", "attend_current": True},
    "stick_breaking, remainder": {"kind": "stick_breaking", "remainder": "head_bias_norm"},
}


def config_of(family: str) -> dict:
    """The config.json of a tiny model, as far as mlx-lm and graft read it."""
    config = CONFIGS[family] if family in CONFIGS else {**SHARED, **MORE[family]}
    return {**config, "model_type": family}


def present(families: Iterable[str]) -> list[str]:
    """Those of the families that this mlx-lm has; 0.31 lacks some."""
    old = mlx_lm.__version__.startswith("0.31.")
    return [name for name in families if not old or find_spec(f"mlx_lm.models.{name}")]


def module_of(family: str):
    """mlx-lm's module of a family."""
    return importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(family, family)}")


def stock(family: str, seed: int = 0, **config):
    """mlx-lm's own model, every weight random and large enough to matter."""
    module = module_of(family)
    return randomise(module.Model(module.ModelArgs.from_dict(config_of(family) | config)), seed)


def grafted(family: str, attention: dict | list, seed: int = 0, **config):
    """The mlx_selective model of the same weights (its temperatures are random too)."""
    fields = {"base_model_type": family, "attention": attention}
    return randomise(Model(ModelArgs(config_of(family) | fields | config)), seed)


def randomise(model, seed: int, part: str = ""):
    """Weights by name, so that a stock and a grafted model of one seed agree.

    Args:
        model: changed in place.
        seed: of all its weights.
        part: leave weights as they are whose names do not have this in them.
    """
    weights = []
    for name, value in tree_flatten(model.parameters()):
        if part not in name:
            continue
        # Logits of a few units, as in trained models: rounding stays rounding.
        scale = 1.4 * value.shape[-1] ** -0.5 if value.ndim > 1 else 0.25
        scale = 0.02 if "temperature" in name else scale
        noise = mx.random.normal(value.shape, key=mx.random.key(hash_name(name) + seed)) * scale
        around = "norm" in "".join(name.split(".")[-2:])  # a norm's weight is near 1
        weights.append((name, value + noise if around else noise))
    model.load_weights(weights, strict=False)
    model.eval()
    return model


def hash_name(name: str) -> int:
    """A number from a name that is the same in every process."""
    return zlib.crc32(name.encode()) % 2**31


def attention_of(layer):
    """The attention module of a layer, stock or grafted, whatever its family calls it."""
    for _, module in layer.named_modules():
        if hasattr(module, "attention_method") or calls_attention(module):
            return module
    raise LookupError(f"{type(layer).__name__} has no attention")


def tokens(batch: int, length: int, seed: int = 0) -> mx.array:
    """Random token ids (batch, length)."""
    return mx.random.randint(0, VOCABULARY, (batch, length), key=mx.random.key(seed))
