"""A method of its own for each layer, such as selective attention in some and softmax in others."""

from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from .method import AttentionMethod


@dataclass(frozen=True)
class Mixed(AttentionMethod):
    """One method a layer; in config.json, ``attention`` is then a list of objects.

    Args:
        layers: the methods, first layer first.
    """

    kind = "mixed"

    layers: tuple[AttentionMethod, ...] = ()

    def __post_init__(self):
        for index, method in enumerate(self.layers):
            if isinstance(getattr(method, "budget", None), list):
                raise UserError(f"attention[{index}].budget must be one number for its layer.")

    @property
    def own_parameters(self) -> tuple[str, ...]:
        """Those of all layers."""
        return tuple({name for method in self.layers for name in method.own_parameters})

    @property
    def float32_parameters(self) -> tuple[str, ...]:
        """Those of all layers."""
        return tuple({name for method in self.layers for name in method.float32_parameters})

    @property
    def prunable(self) -> bool:
        """Whether any layer is."""
        return any(method.prunable for method in self.layers)

    def to_dict(self) -> list[dict[str, Any]]:
        """The ``attention`` list of config.json."""
        return [method.to_dict() for method in self.layers]

    def for_layer(self, layer, layers):
        if len(self.layers) != layers:
            raise UserError(f"attention lists {len(self.layers)} layers, the model has {layers}.")
        return self.layers[layer].for_layer(layer, layers)

    def with_gain(self, gain):
        return replace(self, layers=tuple(method.with_gain(gain) for method in self.layers))

    def with_budget(self, budget):
        """The budget goes to the layers that can be pruned; in a list, the others have None.

        Raises:
            UserError: if no layer can be pruned, or the list does not fit the layers.
        """
        budgets = budget if isinstance(budget, list) else [budget] * len(self.layers)
        if len(budgets) != len(self.layers):
            raise UserError(
                f"budget lists {len(budgets)} layers, attention has {len(self.layers)}."
            )
        if not self.prunable:
            return super().with_budget(budget)
        layers = []
        for method, budget_of_layer in zip(self.layers, budgets, strict=True):
            if method.prunable:
                method = method.with_budget(budget_of_layer)
            elif isinstance(budget, list) and budget_of_layer is not None:
                raise UserError(f"a layer with {method.kind} attention cannot have a budget.")
            layers.append(method)
        return replace(self, layers=tuple(layers))
