"""What a graft would silently lose, refused by name: windows, soft caps, sinks, shared keys."""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from ..errors import UserError

#: field of a config -> what it switches on
_FEATURES = {
    "attn_logit_softcapping": "logit soft-capping",
    "kv_lora_rank": "latent attention",
    "num_kv_shared_layers": "keys and values shared between layers",
    "num_kv_reuse_layers": "keys and values shared between layers",
    "use_cla": "keys and values shared between layers",
    "alibi": "ALiBi biases",
}
#: attribute of an attention module -> what it has then
_PARTS = {
    "sinks": "attention sinks",
    "attention_sink_bias": "attention sinks",
    "kv_lora_rank": "latent attention",
    "attn_logit_softcapping": "logit soft-capping",
    "block_sparse": "block-sparse attention",
}
#: class of a cache that the model makes for a layer -> what that layer has
_CACHES = {
    "RotatingKVCache": "a sliding window",
    "ChunkedKVCache": "attention in chunks",
    "ArraysCache": "a recurrence or a convolution",
    "MambaCache": "a recurrence or a convolution",
    "CacheList": "several caches in one, as hybrid layers and indexers do",
}
#: what configs call a layer that attends to everything before it
_GLOBAL = ("full_attention", "attention")


def config_parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A config, and the config of the language model inside it where a model also sees."""
    yield config
    nested = config.get("text_config")
    yield nested if isinstance(nested, Mapping) else getattr(nested, "__dict__", {})


def refuse_config(config: Mapping[str, Any]) -> None:
    """Refuses what the fields of a config say about its attention.

    Args:
        config: config.json, or the fields of an mlx-lm ModelArgs.

    Raises:
        UserError: naming the feature, the field and its value.
    """
    for part in config_parts(config):
        for field, feature in _FEATURES.items():
            if part.get(field):
                raise UserError(
                    f"this model has {feature} ({field} {part[field]!r}), which a graft would lose."
                )
        kinds = part.get("layer_types")
        if isinstance(kinds, list) and any(kind not in _GLOBAL for kind in kinds):
            others = ", ".join(sorted({str(kind) for kind in kinds} - {*_GLOBAL}))
            raise UserError(
                f"this model has {others} layers (layer_types), which a graft would lose."
            )
        if kinds is None:
            _refuse_window(part)


def _refuse_window(config):
    """Refuses a sliding window that is shorter than the context, unless it is switched off."""
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if not window or config.get("use_sliding_window") is False:
        return
    if not (isinstance(context, int) and isinstance(window, int) and context <= window):
        raise UserError(
            f"this model has a sliding window (sliding_window {window!r}), which a graft would "
            "make global; set it to null in config.json if that is meant."
        )


def refuse_caches(model: nn.Module) -> None:
    """Refuses models that make other caches than plain ones, as windows and recurrences do.

    Raises:
        UserError: naming the layer and what its cache tells.
    """
    if not hasattr(model, "make_cache"):
        return
    caches = model.make_cache()
    if len(caches) != len(model.layers):
        raise UserError(
            f"this model has {len(model.layers)} layers and {len(caches)} caches: its layers "
            "share keys and values or run more than once, which a graft would lose."
        )
    for index, cache in enumerate(caches):
        if type(cache) is not KVCache:
            name = type(cache).__name__
            feature = _CACHES.get(name, f"a cache of its own ({name})")
            raise UserError(f"layer {index} of this model has {feature}, which a graft would lose.")


def refuse_parameters(module: nn.Module) -> None:
    """Refuses attention modules with parts that would be left aside.

    Raises:
        UserError: naming the part.
    """
    for name, feature in _PARTS.items():
        part = getattr(module, name, None)
        if isinstance(part, mx.array) or part:
            raise UserError(
                f"{type(module).__name__} has {feature} ({name}), which a graft would lose."
            )
