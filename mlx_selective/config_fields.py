"""The fields of config.json that a model is built from: types and sizes, checked first."""

from collections.abc import Mapping
from typing import Any

from .errors import UserError

#: What config.json may say: nothing is built from other sizes, numbers and switches.
_SIZES = {
    "num_hidden_layers": 1_000,
    "num_attention_heads": 1_000,
    "num_key_value_heads": 1_000,
    "head_dim": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 1_000_000_000,
    # the names of GPT-2 and its descendants
    "n_layer": 1_000,
    "n_head": 1_000,
    "n_embd": 1_000_000,
    "n_inner": 10_000_000,
    "n_positions": 1_000_000_000,
    "n_ctx": 1_000_000_000,
}
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    *("rope_theta", "rotary_emb_base", "rotary_pct", "partial_rotary_factor"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
_SWITCHES = (
    *("attention_bias", "mlp_bias", "rope_traditional"),
    *("tie_word_embeddings", "use_parallel_residual", "use_sliding_window"),
    *("scale_attn_weights", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"),
)


def check_fields(config: dict[str, Any], names: Mapping[str, str] | None = None) -> None:
    """Checks the fields of config.json that a model is built from, where they are given.

    Args:
        config: config.json as a dict.
        names: mlx-lm's name of a field -> this config's name, where they differ.

    Raises:
        UserError: naming the field whose type or size is wrong.
    """
    names = names or {}

    def field(name):
        return names.get(name, name), config.get(names.get(name, name))

    for name, bound in _SIZES.items():
        name, size = field(name)
        whole = isinstance(size, int) and not isinstance(size, bool)
        if size is not None and not (whole and 1 <= size <= bound):
            raise UserError(
                f"config.json: {name} must be a whole number from 1 to {bound}, got {size!r}."
            )
    for name, number in map(field, _NUMBERS):
        real = isinstance(number, (int, float)) and not isinstance(number, bool)
        if number is not None and not (real and 0 < number < 1e30):
            raise UserError(f"config.json: {name} must be a positive number, got {number!r}.")
    for name, switch in map(field, _SWITCHES):
        if switch is not None and not isinstance(switch, bool):
            raise UserError(f"config.json: {name} must be true or false, got {switch!r}.")
    kinds = config.get("layer_types")
    if kinds is not None and not (
        isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    ):
        raise UserError(f"config.json: layer_types must be a list of names, got {kinds!r}.")
    multiples = [("num_attention_heads", "num_key_value_heads")]
    if config.get("head_dim") is None:
        multiples += [("hidden_size", "num_attention_heads"), ("n_embd", "n_head")]
    for (many, total), (few, part) in (map(field, pair) for pair in multiples):
        if total and part and total % part:
            raise UserError(f"config.json: {many} {total} must be a multiple of {few} {part}.")


def flatten_rope(config: dict[str, Any], base_model_type: str) -> dict[str, Any]:
    """The fields that mlx-lm reads, of transformers 5's nested ``rope_parameters``.

    Args:
        config: config.json as a dict.
        base_model_type: the mlx-lm model that reads them; GPT-NeoX has names of its own.

    Raises:
        UserError: if ``rope_parameters`` or ``rope_scaling`` is no object.
    """
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            raise UserError(f"config.json: {name} must be an object, got {config[name]!r}.")
    rope = config.get("rope_parameters") or {}
    names = {name: name for name in ("rope_theta", "partial_rotary_factor")}
    if base_model_type == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    fields = {names[name]: rope[name] for name in names if name in rope}
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return fields
