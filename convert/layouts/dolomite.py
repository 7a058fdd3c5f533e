"""Dolomite stick-breaking, as in shawntan/stickbreaking-3b; mlx-lm's granite without RoPE.

Granite has the same four multipliers (embedding, residual, logits, attention).
"""

from ...attention import StickBreaking
from .layout import Layout, PerHead, Stacked, refuse_unless, require

#: mlx-lm's name of a field -> dolomite's
_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "rms_norm_eps": "layer_norm_epsilon",
}
_MULTIPLIERS = {
    "embedding_multiplier": "m_emb",
    "residual_multiplier": "m_residual",
    "logits_scaling": "m_width",
}


def _config(source):
    fields = dict(zip(_NAMES, require(source, *_NAMES.values()), strict=True))
    require(source, "vocab_size")
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    refuse_unless(source, "attention_head_type", "mha", "mha")
    refuse_unless(source, "num_key_value_heads", heads, heads)
    refuse_unless(source, "activation_function", "swiglu", "swiglu")
    refuse_unless(source, "normalization_function", "rmsnorm", "rmsnorm")
    refuse_unless(source, "position_embedding_type", "nope", "nope")
    refuse_unless(source, "sb_remainder", False, False)
    refuse_unless(source, "add_bias", False, False)
    # The keys of config.json that say the same under another name are replaced, not kept twice.
    return {
        **fields,
        "num_key_value_heads": heads,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_multiplier": source.get("attention_multiplier") or (width // heads) ** -0.5,
        **{name: source.get(own) or 1.0 for name, own in _MULTIPLIERS.items()},
        "rope_theta": 10000.0,
        "tie_word_embeddings": source.get("tie_word_embeddings", True),
        **{
            name: source[name]
            for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
            + ("torch_dtype", "dtype")
            if name in source
        },
    }


_SOURCE, _TARGET = "transformer.h.{i}.", "model.layers.{i}."

DOLOMITE = Layout(
    name="dolomite stick-breaking",
    model_types=("stickbreaking",),
    base_model_type="granite",
    config=_config,
    attention=lambda source: {"kind": StickBreaking.kind},
    weights={
        "transformer.wte.weight": "model.embed_tokens.weight",
        _SOURCE + "ln_1.weight": _TARGET + "input_layernorm.weight",
        # rows of c_attn: per head [q; k; v]
        _SOURCE + "attn.c_attn.weight": PerHead(
            tuple(_TARGET + f"self_attn.{part}_proj.weight" for part in "qkv")
        ),
        _SOURCE + "attn.c_proj.weight": _TARGET + "self_attn.o_proj.weight",
        _SOURCE + "ln_2.weight": _TARGET + "post_attention_layernorm.weight",
        # rows of c_fc: [up; gate]
        _SOURCE + "mlp.c_fc.weight": Stacked(
            (_TARGET + "mlp.up_proj.weight", _TARGET + "mlp.gate_proj.weight")
        ),
        _SOURCE + "mlp.c_proj.weight": _TARGET + "mlp.down_proj.weight",
        "transformer.ln_f.weight": "model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    },
    field_names=_NAMES | _MULTIPLIERS,
)
