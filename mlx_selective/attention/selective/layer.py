"""Selective attention in a layer of an mlx-lm model."""

from dataclasses import dataclass, replace

from ...cache.pruned import MIN_BUDGET, PrunedKVCache
from ...errors import UserError
from ..method import AttentionMethod, LayerCall
from .definition import selective_attention, selective_step


class SelectiveCall(LayerCall):
    """Attends over the kept keys, then hands the new F to the cache, which prunes."""

    def attend(self, queries, keys, values, scale):
        cache = self.cache
        if cache is None:
            return selective_attention(queries, keys, values, scale=scale)
        if not isinstance(cache, PrunedKVCache):
            raise UserError(
                f"selective attention keeps F in a PrunedKVCache, got {type(cache).__name__}; "
                "make the caches with mlx_lm.models.cache.make_prompt_cache(model)."
            )
        kept = {
            "query_positions": cache.query_positions,
            "key_positions": cache.live_positions,
            "F": cache.live_F,
        }
        if queries.shape[2] == 1:
            output, F, slots = selective_step(
                queries, keys, values, scale=scale, evicts=cache.to_evict(), **kept
            )
            cache.prune(F, slots)
        else:
            output, F = selective_attention(
                queries, keys, values, scale=scale, return_F=True, **kept
            )
            cache.prune(F)
        return output


def check_budget(budget) -> None:
    """Raises UserError unless budget is None or an int of at least 2."""
    if budget is None:
        return
    if type(budget) is not int or not MIN_BUDGET <= budget < 2**31:
        raise UserError(
            f"budget must be at least {MIN_BUDGET} keys a layer, an int (the first token and the "
            f"newest never leave), got {budget!r}."
        )


@dataclass(frozen=True)
class Selective(AttentionMethod):
    """Selective attention; with a budget, its context pruning.

    Args:
        budget: keys that each layer keeps, an int for all layers, a list with one int (or None)
            a layer, or None to keep every key.
    """

    kind = "selective"
    call = SelectiveCall
    prunable = True

    budget: int | list[int | None] | None = None

    def __post_init__(self):
        for budget in self.budget if isinstance(self.budget, list) else [self.budget]:
            check_budget(budget)

    def with_budget(self, budget):
        return replace(self, budget=budget)

    def for_layer(self, layer, layers):
        if not isinstance(self.budget, list):
            return self
        if len(self.budget) != layers:
            raise UserError(
                f"attention.budget lists {len(self.budget)} layers, the model has {layers}."
            )
        return replace(self, budget=self.budget[layer])

    def make_cache(self):
        return PrunedKVCache(self.budget)
