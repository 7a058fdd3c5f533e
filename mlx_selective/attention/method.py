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


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of one attention layer, as they arrive at the attention function.

    Args:
        features: width C of the layer's input.
        heads: query heads H.
        key_heads: key and value heads Hkv.
        head_size: size D of a query or key.
        value_size: size Dv of a value.
        rotated: how many dimensions of a head RoPE turns; 0 where the layer has none.
        scaled_by_position: whether queries are scaled by their position, as in ministral3.
        shows_projections: whether :meth:`LayerCall.rotate` gets all queries and then all keys
            as they were projected, or there is no RoPE.
    """

    features: int
    heads: int
    key_heads: int
    head_size: int
    value_size: int
    rotated: int
    scaled_by_position: bool = False
    shows_projections: bool = False


class LayerCall:
    """One call of one grafted layer: what mlx-lm's own attention code meets on its way.

    That code projects, applies norms, turns queries and then keys by ``rope`` from
    ``cache.offset`` on, calls ``cache.update_and_fetch``, and then
    ``scaled_dot_product_attention(..., cache=cache)``. In a grafted layer the cache is a
    LayerCall (there always is one, with or without a cache behind it), ``rope`` is
    :meth:`rotate`, and the attention function is :meth:`attend`.

    Args:
        method: the layer's settings.
        attention: mlx-lm's attention module.
        x: the layer's input (B, T, C), after its norm.
        cache: the layer's own cache or None.

    Attributes:
        offset: position of the first of these tokens, an int, or (B,) where rows differ.
        mask: what :meth:`make_mask` gave.
    """

    def __init__(self, method: "AttentionMethod", attention: nn.Module, x: mx.array, cache: Any):
        self.method = method
        self.attention = attention
        self.cache = cache
        self.offset = 0 if cache is None else cache.offset
        self.mask = self.make_mask(x)

    def make_mask(self, x: mx.array) -> mx.array | str | None:
        """What the tokens x (B, T, C) see: the cache's bool mask, "causal", or None for all."""
        # The layer's own: the mask that the model built belongs to another layer's cache, and
        # layers may keep different numbers of keys.
        return create_attention_mask(x, self.cache)

    def rotate(self, rope: nn.Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """Queries or keys (B, H, T, D) turned by their position: ``rope(x, offset=...)``."""
        return rope(x, *args, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Stores new keys (B, Hkv, T, D) and values (B, Hkv, T, Dv); returns all to be seen."""
        if self.cache is None:
            return keys, values
        return self.cache.update_and_fetch(keys, values)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """The output (B, H, T, Dv) of queries (B, H, T, D) over what was fetched."""
        raise NotImplementedError


@dataclass(frozen=True)
class AttentionMethod:
    """The settings of a method, equal to the ``attention`` object of config.json."""

    kind: ClassVar[str]
    call: ClassVar[type[LayerCall]]
    #: whether its cache can be held to a budget of keys
    prunable: ClassVar[bool] = False
    #: parts of the names of the parameters that install adds: a checkpoint without them is taken
    #: to the method with fresh ones
    own_parameters: ClassVar[tuple[str, ...]] = ()
    #: those of them that stay in float32 when mlx-lm casts a model
    float32_parameters: ClassVar[tuple[str, ...]] = ()

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

    def to_dict(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The ``attention`` object of config.json (a list where layers have their own)."""
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

    def with_gain(self, gain: float) -> "AttentionMethod":
        """The same method with another gain of F, where it has one."""
        return self

    def check(self, attention: nn.Module, shape: AttentionShape) -> None:
        """Refuses a layer that cannot take the method, before any layer changes.

        Args:
            attention: mlx-lm's attention module.
            shape: its sizes.

        Raises:
            UserError: telling why.
        """
        if shape.rotated % 2:
            raise UserError(
                f"{shape.rotated} rotated dimensions of a head; RoPE turns pairs, so the head size "
                "(times the rotated part of it) must be even."
            )

    def install(self, attention: nn.Module, shape: AttentionShape) -> None:
        """Gives mlx-lm's attention module the method's own parameters.

        Args:
            attention: the module of one layer.
            shape: its sizes.
        """

    def make_cache(self) -> Any:
        """An empty cache for one layer."""
        return KVCache()
