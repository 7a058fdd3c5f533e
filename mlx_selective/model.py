"""``model_type: "mlx_selective"``: mlx-lm's model of ``base_model_type``, grafted.

Stock mlx-lm tools reach these two names through the folder's ``model_file`` and
``--trust-remote-code``; this package's own commands pass them to mlx-lm in-process.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from .attention import method_from_dict
from .errors import UserError
from .families import correct_family
from .grafting import GRAFTABLE, graft

MODEL_TYPE = "mlx_selective"
#: Name of the file in a model folder that stock mlx-lm runs, and what it says.
MODEL_FILE = "mlx_selective_model.py"
MODEL_FILE_TEXT = '''"""Lets stock mlx-lm open this folder (--trust-remote-code)."""

from mlx_selective.model import Model, ModelArgs  # noqa: F401
'''

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
}
_NUMBERS = (
    *("rms_norm_eps", "layer_norm_eps", "rope_theta", "rotary_emb_base", "rotary_pct"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
)
_SWITCHES = (
    *("attention_bias", "mlp_bias", "rope_traditional"),
    *("tie_word_embeddings", "use_parallel_residual"),
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
            raise UserError(f"config.json: {name} must be from 1 to {bound}, got {size!r}.")
    for name, number in map(field, _NUMBERS):
        real = isinstance(number, (int, float)) and not isinstance(number, bool)
        if number is not None and not (real and 0 < number < 1e30):
            raise UserError(f"config.json: {name} must be a positive number, got {number!r}.")
    for name, switch in map(field, _SWITCHES):
        if switch is not None and not isinstance(switch, bool):
            raise UserError(f"config.json: {name} must be true or false, got {switch!r}.")
    multiples = [("num_attention_heads", "num_key_value_heads")]
    if config.get("head_dim") is None:
        multiples.append(("hidden_size", "num_attention_heads"))
    for (many, total), (few, part) in (map(field, pair) for pair in multiples):
        if total and part and total % part:
            raise UserError(f"config.json: {many} {total} must be a multiple of {few} {part}.")


class ModelArgs:
    """The config of a converted model.

    Args:
        config: config.json as a dict: ``base_model_type`` (an mlx-lm model type),
            ``attention`` (an object with a ``kind``), and the fields of the base config.

    Raises:
        UserError: naming the field that is missing or wrong.
    """

    def __init__(self, config: dict[str, Any]):
        check_fields(config)
        self.config = dict(config)
        self.model_type = MODEL_TYPE
        self.base_model_type = config.get("base_model_type")
        if self.base_model_type not in GRAFTABLE:
            raise UserError(
                f"config.json: base_model_type must be one of {', '.join(GRAFTABLE)}, "
                f"got {self.base_model_type!r}."
            )
        self.attention = method_from_dict(config.get("attention"))
        self.base = importlib.import_module(f"mlx_lm.models.{self.base_model_type}")
        try:
            self.base_args = self.base.ModelArgs.from_dict(
                {**config, "model_type": self.base_model_type}
            )
        except TypeError as error:  # a dataclass that misses a field
            raise UserError(f"config.json: {error.args[0].split('__init__() ')[-1]}.") from None

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        """What mlx-lm calls with the content of config.json."""
        return cls(config)


def Model(args: ModelArgs) -> nn.Module:
    """Builds the grafted model, with fresh weights: what mlx-lm calls as a class.

    Raises:
        UserError: if mlx-lm cannot build the base model, or it cannot take the attention.
    """
    try:
        model = args.base.Model(args.base_args)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        # mlx-lm trusts config.json; a wrong field ends in whatever Python makes of it.
        raise UserError(
            f"config.json: mlx-lm cannot build a {args.base_model_type} model from it "
            f"({type(error).__name__}: {error})."
        ) from error
    correct_family(model, args.config)
    return graft(model, args.attention)
