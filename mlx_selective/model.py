"""``model_type: "mlx_selective"``: mlx-lm's model of ``base_model_type``, grafted.

Stock mlx-lm tools reach these two names through the folder's ``model_file`` and
``--trust-remote-code``; this package's own commands pass them to mlx-lm in-process.
"""

import importlib
import re
from types import ModuleType
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import MODEL_REMAPPING

from .attention import method_from_dict
from .config_fields import check_fields, flatten_rope
from .errors import UserError
from .grafting import correct_family, graft, refuse_config

MODEL_TYPE = "mlx_selective"
#: Name of the file in a model folder that stock mlx-lm runs, and what it says.
MODEL_FILE = "mlx_selective_model.py"
MODEL_FILE_TEXT = '''"""Lets stock mlx-lm open this folder (--trust-remote-code)."""

from mlx_selective.model import Model, ModelArgs  # noqa: F401
'''


#: What mlx-lm's code makes of a config with a wrong field.
_CONFIG_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError),
    *(LookupError, TypeError, ValueError),
)


class ModelArgs:
    """The config of a converted model.

    Args:
        config: config.json as a dict: ``base_model_type`` (an mlx-lm model type),
            ``attention`` (an object with a ``kind``), and the fields of the base config.

    Raises:
        UserError: naming the field that is missing or wrong.
    """

    def __init__(self, config: dict[str, Any]):
        # A folder of transformers 5 says it in rope_parameters, which mlx-lm does not read.
        config = {**flatten_rope(config, config.get("base_model_type")), **config}
        check_fields(config)
        self.config = dict(config)
        self.model_type = MODEL_TYPE
        self.base_model_type = config.get("base_model_type")
        self.attention = method_from_dict(config.get("attention"))
        self.base = _base_module(self.base_model_type)
        refuse_config(config)
        try:
            self.base_args = self.base.ModelArgs.from_dict(
                {**config, "model_type": self.base_model_type}
            )
        except TypeError as error:  # a dataclass that misses a field
            raise UserError(f"config.json: {error.args[0].split('__init__() ')[-1]}.") from None
        except _CONFIG_ERRORS as error:
            raise UserError(
                f"config.json: no {self.base_model_type} model ({type(error).__name__}: {error})."
            ) from error

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> "ModelArgs":
        """What mlx-lm calls with the content of config.json."""
        return cls(config)


def _base_module(model_type: Any) -> ModuleType:
    """mlx-lm's module of a model type.

    Raises:
        UserError: if it has none.
    """
    name = MODEL_REMAPPING.get(model_type, model_type) if isinstance(model_type, str) else ""
    # The name is about to be imported: it may be a module of mlx_lm.models and nothing else.
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        try:
            module = importlib.import_module(f"mlx_lm.models.{name}")
        except (ImportError, SystemExit):  # olmo.py ends the process where a package is missing
            module = None
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            return module
    raise UserError(
        f"config.json: base_model_type must be a model type of mlx-lm such as llama, "
        f"got {model_type!r}."
    )


def Model(args: ModelArgs) -> nn.Module:
    """Builds the grafted model, with fresh weights: what mlx-lm calls as a class.

    Raises:
        UserError: if mlx-lm cannot build the base model, or it cannot take the attention.
    """
    try:
        model = args.base.Model(args.base_args)
    except _CONFIG_ERRORS as error:
        # mlx-lm trusts config.json; a wrong field ends in whatever Python makes of it.
        raise UserError(
            f"config.json: mlx-lm cannot build a {args.base_model_type} model from it "
            f"({type(error).__name__}: {error})."
        ) from error
    correct_family(model, args.config)
    return graft(model, args.attention)
