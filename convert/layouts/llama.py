"""Hugging Face Llama: transformers' LlamaForCausalLM, mlx-lm's llama."""

from ...config_fields import flatten_rope
from ...errors import UserError
from .layout import Layout, refuse_unless, require


def _config(source):
    require(
        source,
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "rms_norm_eps",
        "vocab_size",
    )
    refuse_unless(source, "hidden_act", "silu", "silu")
    kinds = source.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * source["num_hidden_layers"]:
        raise UserError(
            f"config.json: layer_types {kinds!r} is not supported; "
            "expected full_attention for each of num_hidden_layers."
        )
    # transformers unties unless told; mlx-lm's llama ties.
    return {"tie_word_embeddings": False, **source, **flatten_rope(source, "llama")}


_LAYER = "model.layers.{i}."
_PARTS = (
    "input_layernorm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.v_proj.bias",
    "self_attn.o_proj.bias",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "mlp.gate_proj.bias",
    "mlp.up_proj.bias",
    "mlp.down_proj.bias",
)

LLAMA = Layout(
    name="Hugging Face Llama",
    model_types=("llama",),
    base_model_type="llama",
    config=_config,
    weights={
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        **{_LAYER + part: _LAYER + part for part in _PARTS},
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
    ignored=(r"\.rotary_emb\.inv_freq$",),
)
