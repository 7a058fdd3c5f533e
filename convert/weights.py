"""From the checkpoint's tensors to the model's: the layout's map, checked name by name."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..errors import UserError
from .layouts import Layout


def map_weights(
    layout: Layout,
    tensors: Mapping[str, mx.array],
    model: nn.Module,
    heads: int | None,
    *,
    fresh: tuple[str, ...] = (),
) -> dict[str, mx.array]:
    """Renames and splits the tensors of a checkpoint into the parameters of the model.

    Args:
        layout: the checkpoint's layout.
        tensors: source name -> tensor.
        model: the mlx-selective model, for its parameter names and shapes.
        heads: number of attention heads, for rows that are fused by head.
        fresh: parts of names that may keep their fresh values when the checkpoint lacks them.

    Returns:
        Parameter name -> tensor, complete and of the right shapes.

    Raises:
        UserError: naming the first tensor that is missing, left over, or of a wrong shape or type.
    """
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    rules = dict(layout.rules(len(model.layers), shapes))
    _check_all_known(layout, tensors, rules, shapes)
    weights = {}
    for source, rule in rules.items():
        wanted = [target for target in rule.targets if target in shapes]
        if not wanted:
            continue
        if source not in tensors:
            if any(part in target for part in fresh for target in wanted):
                continue
            raise UserError(
                f"tensor {source} is missing; the checkpoint is incomplete, "
                f"or its config.json belongs to another one.{layout.hint(source)}"
            )
        target_shapes = [shapes[target] for target in rule.targets]
        _check_tensor(source, tensors[source], target_shapes)
        parts = rule.apply(tensors[source], heads, target_shapes)
        weights.update(zip(rule.targets, parts, strict=True))
    return weights


def _check_all_known(layout, tensors, rules, shapes):
    """Refuses tensors that the model would silently do without."""
    tied = "lm_head.weight" not in shapes
    for name in tensors:
        if layout.is_ignored(name) or (tied and name == "lm_head.weight"):
            continue
        if name not in rules:
            raise UserError(f"tensor {name} is not part of the {layout.name} layout.")
        if not any(target in shapes for target in rules[name].targets):
            raise UserError(
                f"tensor {name} has no place in the model that config.json and --attention "
                f"describe.{layout.hint(name)}"
            )


def _check_tensor(source, tensor, target_shapes):
    first, *rest = target_shapes
    expected = first
    if rest:
        expected = (sum(shape[0] for shape in target_shapes), *first[1:])
    if not mx.issubdtype(tensor.dtype, mx.floating):
        raise UserError(
            f"tensor {source} holds {tensor.dtype} numbers; convert the original weights."
        )
    if tuple(tensor.shape) != tuple(expected):
        raise UserError(
            f"tensor {source} has shape {tuple(tensor.shape)}, config.json makes it "
            f"{tuple(expected)}."
        )
