"""mlx-lm's generation, with a budget for the cache."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import GenerationResponse
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache import account, make_prompt_cache, refuse_quantised_keys
from ..errors import UserError
from ..output import safe_text

#: Prompts are read in chunks of this many tokens: memory during the prompt grows with it, and
#: so do the keys that the queries of a chunk see beyond the budget. Ctrl-C waits for the end of
#: a chunk, which on a CPU takes long.
PREFILL_STEP_SIZE = 128 if mx.default_device() == mx.cpu else 512


def stream_generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    *,
    budget: int | list[int] | None = None,
    prompt_cache: list[Any] | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Generates text piece by piece, as mlx_lm.stream_generate does.

    Args:
        model: a model from :func:`mlx_selective.load`.
        tokenizer: its tokenizer.
        prompt: text or token ids.
        max_tokens: most tokens to generate, -1 for no limit.
        budget: keys that each layer keeps, instead of the model's own budget.
        prompt_cache: caches to continue from, updated in place; not together with a budget.
        prefill_step_size: tokens of the prompt that are read at once.
        kwargs: passed on (``sampler``, ``logits_processors`` and so on). A ``draft_model`` needs
            caches that can be trimmed, which pruned ones cannot.

    Yields:
        mlx-lm's GenerationResponse.

    Raises:
        UserError: if both a budget and a prompt_cache are given, or the model has no budget; if
            ``kv_bits`` would quantise pruned caches, which mlx-lm would pass over in silence.
    """
    prompt_cache = _cache_for(model, budget, prompt_cache, kwargs)
    if kwargs.get("kv_bits") is not None:
        refuse_quantised_keys(prompt_cache)
    yield from mlx_lm.stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens,
        prompt_cache=prompt_cache,
        prefill_step_size=prefill_step_size,
        **kwargs,
    )


def generate(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: str | list[int],
    verbose: bool = False,
    *,
    budget: int | list[int] | None = None,
    prompt_cache: list[Any] | None = None,
    **kwargs: Any,
) -> str:
    """Generates a whole text, as mlx_lm.generate does.

    Args:
        verbose: print the text while it comes, then timings and what the cache kept.
        others: as in :func:`stream_generate`.

    Returns:
        The generated text.
    """
    prompt_cache = _cache_for(model, budget, prompt_cache, kwargs)
    if verbose:
        print("=" * 10)
    text, response = "", None
    for response in stream_generate(model, tokenizer, prompt, prompt_cache=prompt_cache, **kwargs):
        text += response.text
        if verbose:
            print(safe_text(response.text), end="", flush=True)
    if verbose and response is not None:
        print("\n" + "=" * 10)
        for count, rate, name in (
            (response.prompt_tokens, response.prompt_tps, "Prompt"),
            (response.generation_tokens, response.generation_tps, "Generation"),
        ):
            print(f"{name}: {count} tokens, {rate:.3f} tokens-per-sec")
        print(f"Peak memory: {response.peak_memory:.3f} GB")
        print(f"Cache: {account(prompt_cache)}")
    return text


def _cache_for(model, budget, prompt_cache, options):
    """The caches to use: those given, or fresh ones (with a draft model's behind them)."""
    if prompt_cache is not None:
        if budget is not None:
            raise UserError("give a budget or a prompt_cache; a cache has its budget already.")
        return prompt_cache
    if budget is not None:
        prompt_cache = make_prompt_cache(model, budget)
    else:
        prompt_cache = mlx_lm_cache.make_prompt_cache(model, options.get("max_kv_size"))
    if options.get("draft_model") is not None:
        prompt_cache = prompt_cache + mlx_lm_cache.make_prompt_cache(options["draft_model"])
    return prompt_cache
