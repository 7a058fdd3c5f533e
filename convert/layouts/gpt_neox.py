"""Hugging Face GPT-NeoX (Pythia), with or without SSA temperatures; mlx-lm's gpt_neox."""

from ...attention import SSA
from ...errors import UserError
from .layout import Layout, flatten_rope, refuse_unless, require


def _config(source):
    require(
        source,
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "layer_norm_eps",
        "vocab_size",
        "max_position_embeddings",
    )
    # transformers' defaults for what old configs leave out
    defaults = {"rotary_pct": 0.25, "rotary_emb_base": 10000, "use_parallel_residual": True}
    config = {**defaults, **source, **flatten_rope(source, theta="rotary_emb_base")}
    # mlx-lm's gpt_neox would rotate without it.
    refuse_unless(config, "rope_scaling", None, None)
    return config


def _attention(source):
    """The temperatures that the field ``selective_self_attention`` describes."""
    settings = source.get("selective_self_attention")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise UserError("config.json: selective_self_attention must be an object.")
    for name, supported in (("key", False), ("per_head", True)):
        if settings.get(name, supported) is not supported:
            raise UserError(
                f"config.json: selective_self_attention.{name} {settings[name]!r} is not "
                f"supported; expected {supported!r}."
            )
    parts = ("query", "value", "token_aware", "position_aware")
    return {"kind": SSA.kind, **{part: settings.get(part, True) for part in parts}}


_SOURCE, _TARGET = "gpt_neox.layers.{i}.", "model.h.{i}."
_PARTS = (
    "input_layernorm.weight",
    "input_layernorm.bias",
    "attention.query_key_value.weight",
    "attention.query_key_value.bias",
    "attention.dense.weight",
    "attention.dense.bias",
    "post_attention_layernorm.weight",
    "post_attention_layernorm.bias",
    "mlp.dense_h_to_4h.weight",
    "mlp.dense_h_to_4h.bias",
    "mlp.dense_4h_to_h.weight",
    "mlp.dense_4h_to_h.bias",
)

GPT_NEOX = Layout(
    name="Hugging Face GPT-NeoX",
    model_types=("gpt_neox",),
    base_model_type="gpt_neox",
    config=_config,
    attention=_attention,
    weights={
        "gpt_neox.embed_in.weight": "model.embed_in.weight",
        **{_SOURCE + part: _TARGET + part for part in _PARTS},
        _SOURCE + "attention.ssa_query.weight": _TARGET + "attention.query_temperature.weight",
        _SOURCE + "attention.ssa_query_alpha": _TARGET + "attention.query_temperature.alpha",
        _SOURCE + "attention.ssa_value.weight": _TARGET + "attention.value_temperature.weight",
        _SOURCE + "attention.ssa_value_alpha": _TARGET + "attention.value_temperature.alpha",
        "gpt_neox.final_layer_norm.weight": "model.final_layer_norm.weight",
        "gpt_neox.final_layer_norm.bias": "model.final_layer_norm.bias",
        "embed_out.weight": "model.embed_out.weight",
    },
    ignored=(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
