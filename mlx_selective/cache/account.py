"""What a model's caches hold, and what full ones would."""

from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache


@dataclass(frozen=True)
class CacheAccount:
    """Counts over all layers of a model.

    Args:
        budget: keys a layer may keep; a list where layers differ; None for all.
        kept: keys a layer keeps; a list where layers differ.
        tokens: tokens seen, the true position of the next one.
        bytes: bytes allocated by the caches.
        full_bytes: bytes that mlx-lm's KVCache would have allocated for the same tokens; for
            caches of other kinds (quantised, state space), their own bytes.
    """

    budget: int | list[int | None] | None
    kept: int | list[int]
    tokens: int
    bytes: int
    full_bytes: int

    def to_json(self) -> dict[str, Any]:
        """The ``cache`` object that ``generate --format json`` prints."""
        record = asdict(self)
        del record["tokens"]
        return record

    @property
    def kept_text(self) -> str:
        """How many keys a layer keeps, as a number or a range."""
        return _as_text(self.kept)

    @property
    def budget_text(self) -> str | None:
        """How many keys a layer may keep, as a number or a range; None for all."""
        return None if self.budget is None else _as_text(self.budget)

    def __str__(self) -> str:
        return (
            f"{self.kept_text} of {self.tokens} tokens kept in each layer, "
            f"{self.bytes / 1e6:.2f} MB (a full cache: {self.full_bytes / 1e6:.2f} MB)"
        )


def account(prompt_cache: list[Any]) -> CacheAccount:
    """Counts what the caches of a model hold.

    Args:
        prompt_cache: one cache a layer, as make_prompt_cache returns them.
    """
    return CacheAccount(
        budget=_one_or_all([getattr(cache, "budget", None) for cache in prompt_cache]),
        kept=_one_or_all([cache.size() or _tokens(cache) for cache in prompt_cache]),
        tokens=max(map(_tokens, prompt_cache), default=0),
        bytes=sum(0 if cache.empty() else cache.nbytes for cache in prompt_cache),
        full_bytes=sum(_full_bytes(cache) for cache in prompt_cache),
    )


def _as_text(numbers: int | list[int | None]) -> str:
    if isinstance(numbers, int):
        return str(numbers)
    some = [number for number in numbers if number is not None]
    most = "all" if len(some) < len(numbers) else max(some)
    return f"{min(some)}-{most}"


def _one_or_all(values: list) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else values


def _tokens(cache: Any) -> int:
    """Tokens a cache has seen; 0 where it does not count them, as mlx-lm's state caches do."""
    offset = getattr(cache, "offset", 0)
    return int(offset.max()) if isinstance(offset, mx.array) else offset


def _full_bytes(cache: Any) -> int:
    if cache.empty():
        return 0
    arrays = (getattr(cache, "keys", None), getattr(cache, "values", None))
    if not all(isinstance(array, mx.array) for array in arrays):
        return cache.nbytes  # quantised, or a state that does not grow with the text
    slots = -(-_tokens(cache) // KVCache.step) * KVCache.step
    return sum(array.nbytes // array.shape[2] for array in arrays) * slots
