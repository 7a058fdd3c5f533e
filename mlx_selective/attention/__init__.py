"""The attention methods, a folder each: definition, layer, and a page of mathematics."""

from typing import Any

from ..errors import UserError
from .method import AttentionMethod, AttentionShape, LayerCall
from .mixed import Mixed
from .selective import Selective, selective_attention
from .softmax import Softmax
from .ssa import SSA, ssa_attention
from .stick_breaking import StickBreaking, stick_breaking_attention

#: ``kind`` in config.json's ``attention`` object -> the method.
METHODS: dict[str, type[AttentionMethod]] = {
    method.kind: method for method in (Selective, SSA, StickBreaking, Softmax)
}


def method_from_dict(attention: Any) -> AttentionMethod:
    """The method that config.json's ``attention`` describes.

    Args:
        attention: an object, ``{"kind": "selective", "budget": 256}`` and the like, or a list of
            such objects, one a layer.

    Raises:
        UserError: if it is neither, or a kind or a field is unknown.
    """
    if isinstance(attention, list) and attention:
        return Mixed(tuple(map(_layer_method, attention)))
    return _layer_method(attention)


def _layer_method(attention: Any) -> AttentionMethod:
    if not isinstance(attention, dict) or "kind" not in attention:
        raise UserError(
            'attention must be an object such as {"kind": "selective"}, or a list with one for '
            f"each layer; got {attention!r}."
        )
    settings = dict(attention)
    kind = settings.pop("kind")
    if not isinstance(kind, str) or kind not in METHODS:
        raise UserError(f"attention.kind {kind!r} is unknown; expected {', '.join(METHODS)}.")
    return METHODS[kind].from_dict(settings)


__all__ = [
    "METHODS",
    "SSA",
    "AttentionMethod",
    "AttentionShape",
    "LayerCall",
    "Mixed",
    "Selective",
    "Softmax",
    "StickBreaking",
    "method_from_dict",
    "selective_attention",
    "ssa_attention",
    "stick_breaking_attention",
]
