"""The loss of a model under budgets, on whole documents read as a pruned cache reads them."""

import mlx.core as mx
import mlx.nn as nn

from ..attention.selective import as_decoded
from ..attention.selective.as_decoded import Rule
from ..errors import UserError


def mean_loss(
    model: nn.Module,
    documents: mx.array,
    budgets: int | list[int | None] | None = None,
    *,
    chunk: int = 1,
    rule: Rule | None = None,
    batch_size: int = 8,
) -> float:
    """Mean negative log-likelihood of the tokens after each document's first.

    Args:
        model: a model with selective attention in all layers; keeps its own budgets.
        documents: (B, N) int32, without padding.
        budgets: keys that each layer keeps, one number or one a layer; None for all.
        chunk: tokens that come at a time; 1 is token by token.
        rule: another rule by which keys leave, to compare with.
        batch_size: documents that are read at once.

    Returns:
        Nats per token.

    Raises:
        UserError: if the model cannot be pruned.
    """
    before = check_prunable(model)
    total = 0.0
    model.exchange_attention(before.with_budget(budgets))
    try:
        with as_decoded(chunk, rule):
            for start in range(0, documents.shape[0], batch_size):
                ids = documents[start : start + batch_size]
                logits = model(ids[:, :-1]).astype(mx.float32)
                right = mx.take_along_axis(logits, ids[:, 1:, None], axis=2)[..., 0]
                total += (mx.logsumexp(logits, axis=-1) - right).sum().item()
    finally:
        model.exchange_attention(before)
    return total / documents[:, 1:].size


def check_prunable(model: nn.Module):
    """The model's attention.

    Raises:
        UserError: if not all layers can be held to a budget.
    """
    attention = getattr(model, "attention", None)
    if getattr(attention, "kind", None) != "selective":
        kind = attention.kind if attention else "its own"
        raise UserError(
            f"budgets need a model with selective attention in all layers; this has {kind}."
        )
    return attention
