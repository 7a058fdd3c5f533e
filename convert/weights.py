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
        fresh: parts of names of parameters that keep their fresh values if the checkpoint has
            none of them; some without the others are an incomplete checkpoint.

    Returns:
        Parameter name -> tensor, of the right shapes, complete but for the fresh ones.

    Raises:
        UserError: naming the first tensor that is missing, left over, or of a wrong shape or type.
    """
    shapes = {name: value.shape for name, value in tree_flatten(model.parameters())}
    rules = dict(layout.rules(len(model.layers), shapes))
    _check_all_known(layout, tensors, rules, shapes)
    own = {name for name in shapes if any(part in name for part in fresh)}
    given = {target for name in tensors if name in rules for target in rules[name].targets}
    required = set(shapes) if own & given else set(shapes) - own
    weights = {}
    for source, rule in rules.items():
        if source not in tensors:
            if required.isdisjoint(rule.targets):
                continue
            raise UserError(
                f"tensor {source} is missing; the checkpoint is incomplete, "
                f"or its config.json belongs to another one.{layout.hint(source)}"
            )
        if shapes.keys().isdisjoint(rule.targets):
            continue  # the copy of tied weights
        target_shapes = [shapes[target] for target in rule.targets]
        _check_tensor(source, tensors[source], target_shapes)
        parts = rule.apply(tensors[source], heads, target_shapes)
        weights.update(zip(rule.targets, parts, strict=True))
    for name in sorted(required - weights.keys()):
        raise UserError(f"the {layout.name} layout has no tensor for the model's {name}.")
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
