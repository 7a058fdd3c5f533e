"""Hugging Face GPT-NeoX (Pythia), with or without SSA temperatures; mlx-lm's gpt_neox."""

from ...attention import SSA
from ...config_fields import flatten_rope
from ...errors import UserError
from .layout import Layout, refuse_unless, require


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
    config = {**defaults, **source, **flatten_rope(source, "gpt_neox")}
    # mlx-lm's gpt_neox would rotate without it.
    refuse_unless(config, "rope_scaling", None, None)
    return config


#: what can have a temperature; the tensors of a key's are named by analogy
_SSA_PARTS = ("query", "key", "value")


def _attention(source):
    """The temperatures that the field ``selective_self_attention`` describes."""
    settings = source.get("selective_self_attention")
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise UserError("config.json: selective_self_attention must be an object.")
    defaults = {"query": True, "key": False, "value": True}
    defaults |= {"token_aware": True, "position_aware": True, "per_head": True}
    settings = defaults | {name: settings[name] for name in defaults if name in settings}
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise UserError(
                f"config.json: selective_self_attention.{name} must be true or false, "
                f"got {value!r}."
            )
    if not settings["per_head"]:
        raise UserError(
            "config.json: selective_self_attention.per_head False is not supported; expected True."
        )
    return {
        "kind": SSA.kind,
        **{part: settings[part] for part in _SSA_PARTS},
        "token_map": "linear" if settings["token_aware"] else "none",
        "position_map": "alpha" if settings["position_aware"] else "none",
    }


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
        **{
            f"{_SOURCE}attention.ssa_{part}{source}": (
                f"{_TARGET}attention.{part}_temperature.{target}"
            )
            for part in _SSA_PARTS
            for source, target in ((".weight", "weight"), ("_alpha", "alpha"))
        },
        "gpt_neox.final_layer_norm.weight": "model.final_layer_norm.weight",
        "gpt_neox.final_layer_norm.bias": "model.final_layer_norm.bias",
        "embed_out.weight": "model.embed_out.weight",
    },
    ignored=(r"\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)$",),
)
