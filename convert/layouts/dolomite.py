"""Dolomite stick-breaking, as in shawntan/stickbreaking-3b; mlx-lm's granite without RoPE.

Granite has the same four multipliers (embedding, residual, logits, attention). The model type and
names are those of dolomite-engine from December 2024 to February 2025 (0296e23 to e037669).
"""

from ...attention import StickBreaking
from ...errors import UserError
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
    refuse_unless(source, "attention_head_type", "mha", "mha", "gqa")
    if not _is_grouped(source):
        refuse_unless(source, "num_key_value_heads", heads, heads)
    refuse_unless(source, "activation_function", "swiglu", "swiglu")
    refuse_unless(source, "normalization_function", "rmsnorm", "rmsnorm")
    refuse_unless(source, "position_embedding_type", "nope", "nope")
    refuse_unless(source, "sb_remainder", True, True, False)
    refuse_unless(source, "add_bias", False, False)
    key_heads = require(source, "num_key_value_heads")[0] if _is_grouped(source) else heads
    # The keys of config.json that say the same under another name are replaced, not kept twice.
    return {
        **fields,
        "num_key_value_heads": key_heads,
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


def _is_grouped(source):
    return source.get("attention_head_type") == "gqa"


def _attention(source):
    """The settings that the config implies; an ``attention`` object in it says otherwise."""
    told = source.get("attention", {})
    if not isinstance(told, dict):
        raise UserError(
            'config.json: attention must be an object such as {"remainder": "value"}, '
            f"got {told!r}."
        )
    return {
        "kind": StickBreaking.kind,
        # Or what the tensors tell: nothing in a config tells the three forms of true apart.
        "remainder": "head_bias" if source.get("sb_remainder", True) else "none",
        # What this version computed wherever heads were grouped (e0e07f4).
        "grouping": "tiled" if _is_grouped(source) else "interleaved",
        **told,
    }


def _remainder_by_tensors(source, names):
    """The form that ``sb_remainder: true`` stands for."""
    told = source.get("sb_remainder", True)
    if not told or "remainder" in source.get("attention", {}):
        return {}
    parts = {name.split(".attn.")[-1] for name in names}
    if "head_bias" in parts:
        return {"remainder": "head_bias_norm" if "norm.weight" in parts else "head_bias"}
    # A form without tensors is not assumed where nothing was said of one.
    return {"remainder": "value"} if "sb_remainder" in source else {}


_SOURCE, _TARGET = "transformer.h.{i}.", "model.layers.{i}."

DOLOMITE = Layout(
    name="dolomite stick-breaking",
    model_types=("stickbreaking",),
    base_model_type="granite",
    config=_config,
    attention=_attention,
    attention_by_tensors=_remainder_by_tensors,
    weights={
        "transformer.wte.weight": "model.embed_tokens.weight",
        _SOURCE + "ln_1.weight": _TARGET + "input_layernorm.weight",
        # rows of c_attn: per key head [q of its query heads; k; v]
        _SOURCE + "attn.c_attn.weight": PerHead(
            tuple(_TARGET + f"self_attn.{part}_proj.weight" for part in "qkv")
        ),
        _SOURCE + "attn.head_bias": _TARGET + "self_attn.head_bias",
        _SOURCE + "attn.norm.weight": _TARGET + "self_attn.head_norm.weight",
        _SOURCE + "attn.norm.bias": _TARGET + "self_attn.head_norm.bias",
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
    hints={
        r"\.attn\.(head_bias|norm\.)": "sb_remainder and the tensors tell of different forms; say "
        'in config.json which it is: "attention": {"remainder": "value"}, or none, head_bias or '
        "head_bias_norm."
    },
)
