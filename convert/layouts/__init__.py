"""The checkpoint layouts that can be converted, a file each."""

from typing import Any

from ...errors import UserError
from .dolomite import DOLOMITE
from .gpt_neox import GPT_NEOX
from .layout import Layout
from .llama import LLAMA
from .own import OWN

LAYOUTS: tuple[Layout, ...] = (LLAMA, GPT_NEOX, DOLOMITE, OWN)


def find_layout(config: dict[str, Any]) -> Layout:
    """The layout of a checkpoint, by ``model_type`` of its config.json.

    Raises:
        UserError: if no layout has that type, naming the known ones.
    """
    model_type = config.get("model_type")
    for layout in LAYOUTS:
        if model_type in layout.model_types:
            return layout
    known = ", ".join(name for layout in LAYOUTS for name in layout.model_types)
    raise UserError(
        f"config.json: model_type {model_type!r} is not an architecture that convert knows; "
        f"expected one of {known}."
    )


__all__ = ["LAYOUTS", "Layout", "find_layout"]
