"""Selective attention in a layer of an mlx-lm model."""

from dataclasses import dataclass, replace

import mlx.core as mx

from ...cache.pruned import MIN_BUDGET, PrunedKVCache
from ...errors import UserError
from ..method import AttentionMethod, LayerCall
from .as_decoded import current_decoding, decoded_attention
from .definition import selective_attention, selective_step
from .memory_loss import TrainingPass, current_pass


class SelectiveCall(LayerCall):
    """Attends over the kept keys, then hands the new F to the cache, which prunes."""

    def attend(self, queries, keys, values, scale):
        cache, gain = self.cache, self.method.gain_if_any
        training = current_pass()
        if cache is None and training is not None:
            return _train(training, gain, queries, keys, values, scale)
        if cache is None and (decoding := current_decoding()) is not None:
            own = {"budget": self.method.budget, "decoding": decoding, "gain": gain}
            return decoded_attention(queries, keys, values, scale=scale, **own)
        if cache is None:
            return selective_attention(queries, keys, values, scale=scale, gain=gain)
        if not isinstance(cache, PrunedKVCache):
            raise UserError(
                f"selective attention keeps F in a PrunedKVCache, got {type(cache).__name__}; "
                "make the caches with mlx_lm.models.cache.make_prompt_cache(model)."
            )
        kept = {
            "query_positions": cache.query_positions,
            "key_positions": cache.live_positions,
            "F": cache.live_F,
            "gain": gain,
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


def _train(training: TrainingPass, gain, queries, keys, values, scale) -> mx.array:
    """The output; the pass is left what the layer still needs. Its gain goes before the model's."""
    options = {} if training.keep is None else {"block_size": training.block_size}
    output, remaining = selective_attention(
        *(queries, keys, values),
        scale=scale,
        return_remaining=True,
        gain=gain if training.gain is None else training.gain,
        keep=training.keep,
        **options,
    )
    training.remaining.append(remaining)
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
        gain: multiplies what head 0 selects: below 1 in a model on its way to selective
            attention; config.json has it only there.

    Raises:
        UserError: if one of them is out of range.
    """

    kind = "selective"
    call = SelectiveCall
    prunable = True

    budget: int | list[int | None] | None = None
    gain: float = 1.0

    def __post_init__(self):
        if type(self.gain) not in (int, float) or not 0 <= self.gain <= 1:
            raise UserError(f"attention.gain must be a number from 0 to 1, got {self.gain!r}.")
        for budget in self.budget if isinstance(self.budget, list) else [self.budget]:
            check_budget(budget)

    @property
    def gain_if_any(self) -> float | None:
        """None for 1, where kernels run and nothing is multiplied."""
        return None if self.gain == 1 else self.gain

    def to_dict(self):
        settings = super().to_dict()
        if self.gain == 1:
            del settings["gain"]
        return settings

    def with_gain(self, gain):
        return replace(self, gain=gain)

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
