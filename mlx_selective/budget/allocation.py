"""The paper's greedy allocation of budgets to layers (Leviathan et al., arXiv 2410.02703).

All layers start with every key. Again and again the layer whose loss rises least gets fewer,
until the loss reaches a threshold. The paper does not tell the size of a step; here a step takes
a share of what a layer has, and what is compared is the rise for each key that is freed. What was
measured of a layer before others shrank is only measured again when it seems the best (as lazy
greedy algorithms do): rises seldom become smaller.
"""

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..cache.pruned import MIN_BUDGET


@dataclass(frozen=True)
class Step:
    """One state of an allocation.

    Args:
        budgets: keys that each layer keeps.
        loss: nats per token under them.
    """

    budgets: list[int]
    loss: float


def allocate(
    loss_of: Callable[[list[int]], float],
    start: Step,
    most: float,
    *,
    shrink: float = 0.75,
) -> Iterator[Step]:
    """Takes keys from layers while the loss stays at or below a threshold.

    Args:
        loss_of: the loss under budgets, one a layer.
        start: the budgets to begin with, and their loss.
        most: the loss that must not be exceeded.
        shrink: the share of its keys that a layer has after a step, between 0 and 1. A step that
            would exceed the threshold is tried again half as large, down to one key.

    Yields:
        Each state that is better than the one before: fewer keys, the loss not above ``most``.
    """
    budgets, loss, version = list(start.budgets), start.loss, 0
    # (rise for each key, layer, its next budget, the loss then, the version that was measured)
    queue = [
        (-math.inf, layer, fewer, math.nan, -1)
        for layer, budget in enumerate(budgets)
        if (fewer := _next(budget, shrink)) is not None
    ]
    while queue:
        rise, layer, fewer, found, measured = heapq.heappop(queue)
        if measured != version:
            found = loss_of([*budgets[:layer], fewer, *budgets[layer + 1 :]])
            rise = (found - loss) / (budgets[layer] - fewer)
            heapq.heappush(queue, (rise, layer, fewer, found, version))
        elif found > most:
            half = budgets[layer] - (budgets[layer] - fewer) // 2
            if half < budgets[layer]:
                heapq.heappush(queue, (rise, layer, half, math.nan, -1))
        else:
            budgets[layer], loss, version = fewer, found, version + 1
            yield Step(list(budgets), loss)
            if (fewer := _next(fewer, shrink)) is not None:
                heapq.heappush(queue, (-math.inf, layer, fewer, math.nan, -1))


def _next(budget: int, shrink: float) -> int | None:
    """The budget after a step, or None where no key can go."""
    fewer = max(MIN_BUDGET, min(budget - 1, int(budget * shrink)))
    return fewer if fewer < budget else None
