"""The interface of an attention method: what ``graft`` needs to know of it.

A new method is a folder beside the others with two small classes: an :class:`AttentionMethod`,
the method's settings as they stand in config.json, and a :class:`LayerCall`, what it does when
mlx-lm's attention code of one layer runs. ``METHODS`` in ``__init__.py`` lists it.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from ..errors import UserError


class LayerCall:
    """One call of one grafted layer. It takes the place of the cache in mlx-lm's own code.

    That code projects, applies norms and RoPE at ``cache.offset``, calls
    ``cache.update_and_fetch`` and then ``scaled_dot_product_attention(..., cache=cache)``,
    which a grafted layer sends to :meth:`attend`. There is always a LayerCall, with or without
    a cache behind it.

    Args:
        method: the layer's settings.
        attention: mlx-lm's attention module.
        x: the layer's input (B, T, C), after its norm.
        cache: the layer's own cache or None.
    """

    def __init__(self, method: "AttentionMethod", attention: nn.Module, x: mx.array, cache: Any):
        self.method = method
        self.cache = cache
        self.offset = 0 if cache is None else cache.offset
        # The layer's own mask: the one the model built belongs to another layer's cache, and
        # layers may keep different numbers of keys.
        self.mask = create_attention_mask(x, cache)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores the new keys and values (B, Hkv, T, D); returns all that the queries may see."""
        if self.cache is None:
            return keys, values
        return self.cache.update_and_fetch(keys, values)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """The attention output (B, H, T, D) of queries (B, H, T, D) over what was fetched."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionMethod:
    """The settings of a method, equal to the ``attention`` object of config.json."""

    kind: ClassVar[str]
    call: ClassVar[type[LayerCall]]

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> "AttentionMethod":
        """Builds the method from config.json's ``attention`` object (without ``kind``).

        Raises:
            UserError: on a field that the method does not have.
        """
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                expected = ", ".join(known) or "no fields"
                raise UserError(
                    f"attention.{name} is not a field of {cls.kind}; expected {expected}."
                )
        return cls(**settings)

    def to_dict(self) -> dict[str, Any]:
        """The ``attention`` object of config.json."""
        return {"kind": self.kind, **asdict(self)}

    def for_layer(self, layer: int, layers: int) -> "AttentionMethod":
        """The settings of one of the model's layers; the same for all unless overridden."""
        return self

    def with_budget(self, budget: int | list[int | None]) -> "AttentionMethod":
        """The same method under another budget of keys.

        Raises:
            UserError: if this attention cannot be pruned.
        """
        raise UserError(
            f"a budget needs a model with selective attention; this model has {self.kind} "
            "(leave out --budget)."
        )

    def install(self, attention: nn.Module, args: Any) -> None:
        """Prepares mlx-lm's attention module: new parameters, or parts taken out.

        Args:
            attention: the module of one layer.
            args: the ModelArgs of the mlx-lm model.
        """

    def make_cache(self) -> Any:
        """An empty cache for one layer."""
        return KVCache()
