"""Making a model's caches with a budget other than the one in its config."""

from typing import Any

import mlx.nn as nn
from mlx_lm.models import cache as mlx_lm_cache

from ..errors import UserError
from .pruned import PrunedKVCache


def make_prompt_cache(model: nn.Module, budget: int | list[int] | None = None) -> list[Any]:
    """One empty cache a layer.

    Args:
        model: a grafted model, or any mlx-lm model when there is no budget.
        budget: keys that each layer keeps, instead of the model's own budget.

    Raises:
        UserError: if the model's attention cannot be pruned.
    """
    if budget is None:
        return mlx_lm_cache.make_prompt_cache(model)
    if not hasattr(getattr(model, "attention", None), "with_budget"):
        raise UserError(
            f"a budget needs a model with selective attention; {model.model_type} was loaded "
            "without it (convert with --attention selective)."
        )
    return model.make_cache(budget)


def refuse_quantised_keys(prompt_cache: list[Any]) -> None:
    """Refuses ``kv_bits`` for pruned caches, before anything is generated.

    Args:
        prompt_cache: one cache a layer.

    Raises:
        UserError: if any of them is pruned.
    """
    if any(isinstance(cache, PrunedKVCache) for cache in prompt_cache):
        raise UserError("a pruned KV cache cannot be quantised; leave out kv_bits.")
