"""Budgets as people think of them: keys a layer, memory, or how much may be lost."""

import argparse
import math
import re
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..cache import make_prompt_cache
from ..cache.pruned import MIN_BUDGET
from ..errors import UserError
from ..loading import load, model_folder
from .curve import budgets_within
from .measure import check_prunable

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


@dataclass(frozen=True)
class Memory:
    """A budget for the caches of all layers together.

    Args:
        bytes: of keys, values, positions and F.
    """

    bytes: int


def keys_or_memory(text: str) -> int | Memory:
    """argparse type: ``256`` keys a layer, or ``64MB`` (``GB``, ``MiB``, ...) in all."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b", text.strip().lower())
    if found and found[2] in _UNITS:
        return Memory(round(float(found[1]) * _UNITS[found[2]]))
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be keys a layer such as 256, or memory such as 64MB, got {text!r}"
        ) from None


def percentage(text: str) -> float:
    """argparse type: ``1%`` or ``0.01`` as 0.01."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"must be a share such as 1% or 0.01, got {text!r}")
    return value


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """--budget and --max-loss, of which one can be given."""
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--budget",
        type=keys_or_memory,
        help="Keys each layer keeps, such as 256, or memory of the cache, such as 64MB "
        "(selective attention; default: as the model's config says).",
    )
    either.add_argument(
        "--max-loss",
        type=percentage,
        help="The smallest budgets whose perplexity rises by no more, such as 1%%, by the curve "
        "that mlx-selective budget left in the model.",
    )


def load_within(args: argparse.Namespace, model: str) -> tuple[nn.Module, TokenizerWrapper]:
    """The model and tokenizer that the flags ask for.

    Args:
        args: with ``budget``, ``max_loss`` and ``adapter_path``.
        model: folder or Hub id.

    Raises:
        UserError: as :func:`mlx_selective.load`, or if the budget is too small.
    """
    folder, budget = model_folder(model), args.budget
    if args.max_loss is not None:
        budget = budgets_within(folder, args.max_loss)
    memory = budget if isinstance(budget, Memory) else None
    loaded, tokenizer = load(folder, None if memory else budget, adapter_path=args.adapter_path)
    if memory:
        attention = check_prunable(loaded)
        budgets = budgets_of(memory, loaded)
        loaded.exchange_attention(attention.with_budget(budgets))
    return loaded, tokenizer


def budgets_of(memory: Memory, model: nn.Module) -> list[int]:
    """Keys that each layer keeps so that all caches of one conversation take no more.

    Layers that have budgets keep their proportions; otherwise all get the same.

    Args:
        memory: for the caches.
        model: with selective attention in all layers.

    Raises:
        UserError: if not even the smallest budgets fit.
    """
    shares = model.attention.budget
    if not isinstance(shares, list) or None in shares:
        shares = [1] * len(model.layers)
    per_key = key_bytes(model)
    # a layer has a slot more than its budget: the next token's
    room = memory.bytes - sum(per_key)
    least = sum(MIN_BUDGET * one for one in per_key)
    if room < least:
        raise UserError(
            f"--budget: the caches of {len(per_key)} layers take at least "
            f"{least + sum(per_key):,} bytes, got {memory.bytes:,}."
        )
    most = 2**31 - 1
    low, high = 0.0, float(most)
    for _ in range(64):  # the largest scale of the shares that fits
        scale = (low + high) / 2
        fits = sum(max(MIN_BUDGET, s * scale) * b for s, b in zip(shares, per_key, strict=True))
        low, high = (scale, high) if fits <= room else (low, scale)
    return [max(MIN_BUDGET, min(most, int(share * low))) for share in shares]


def key_bytes(model: nn.Module) -> list[int]:
    """Bytes that one key takes in each layer's cache, with its value, position and F."""
    caches: list[Any] = make_prompt_cache(model, MIN_BUDGET)
    model(mx.array([[0] * (MIN_BUDGET + 1)]), cache=caches)
    return [cache.nbytes // cache.keys.shape[2] for cache in caches]
