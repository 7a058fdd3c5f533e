"""``model_type: "mlx_selective"``: mlx-lm's model of ``base_model_type``, grafted.

Stock mlx-lm tools reach these two names through the folder's ``model_file`` and
``--trust-remote-code``; this package's own commands pass them to mlx-lm in-process.
"""

import importlib
from typing import Any

import mlx.nn as nn

from .attention import method_from_dict
from .config_fields import check_fields
from .errors import UserError
from .families import correct_family
from .grafting import GRAFTABLE, graft

MODEL_TYPE = "mlx_selective"
#: Name of the file in a model folder that stock mlx-lm runs, and what it says.
MODEL_FILE = "mlx_selective_model.py"
MODEL_FILE_TEXT = '''"""Lets stock mlx-lm open this folder (--trust-remote-code)."""

from mlx_selective.model import Model, ModelArgs  # noqa: F401
'''


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
    graft(model, args.attention)
    for _, module in model.named_modules():
        if isinstance(module, nn.RoPE) and module.dims % 2:
            raise UserError(
                f"config.json: {module.dims} rotated dimensions of a head; RoPE turns pairs, so "
                "the head size (times rotary_pct) must be even."
            )
    return model
