"""How a checkpoint layout is described: one declarative weight map, and what its config means."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ...errors import UserError


@dataclass(frozen=True)
class Rename:
    """One tensor becomes one tensor, unchanged."""

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.target,)

    def apply(self, tensor: mx.array, heads: int) -> list[mx.array]:
        return [tensor]


@dataclass(frozen=True)
class PerHead:
    """Rows are stored head by head, each head's parts after one another: (H, parts, D) rows."""

    targets: tuple[str, ...]

    def apply(self, tensor: mx.array, heads: int) -> list[mx.array]:
        parts, rest = len(self.targets), tensor.shape[1:]
        split = tensor.reshape(heads, parts, -1, *rest)
        return [split[:, part].reshape(-1, *rest) for part in range(parts)]


@dataclass(frozen=True)
class Stacked:
    """Equal blocks of rows, one after another."""

    targets: tuple[str, ...]

    def apply(self, tensor: mx.array, heads: int) -> list[mx.array]:
        return mx.split(tensor, len(self.targets), axis=0)


Rule = Rename | PerHead | Stacked


@dataclass(frozen=True)
class Layout:
    """A checkpoint format that can be converted.

    Args:
        name: what people call it.
        model_types: values of ``model_type`` in its config.json.
        base_model_type: the mlx-lm model that computes it.
        weights: source name -> rule; ``{i}`` stands for the layer index.
        config: turns the source's config.json into the fields of the mlx-lm model.
        attention: the attention settings that the source's config.json implies, or None where
            it does not tell (then ``--attention`` does, and ``softmax`` is the default).
        ignored: regular expressions of tensors that are no weights, such as buffers.
        field_names: mlx-lm's name of a config field -> the source's, where they differ.
    """

    name: str
    model_types: tuple[str, ...]
    base_model_type: str
    weights: Mapping[str, str | PerHead | Stacked]
    config: Callable[[dict[str, Any]], dict[str, Any]]
    attention: Callable[[dict[str, Any]], dict[str, Any] | None] = field(
        default=lambda config: None
    )
    ignored: tuple[str, ...] = ()
    field_names: Mapping[str, str] = field(default_factory=dict)

    def rules(self, layers: int) -> Iterator[tuple[str, Rule]]:
        """Every source name with its rule, for a model of so many layers."""
        for source, rule in self.weights.items():
            rule = Rename(rule) if isinstance(rule, str) else rule
            for index in range(layers) if "{i}" in source else [0]:
                yield _at(source, index), _rule_at(rule, index)

    def is_ignored(self, name: str) -> bool:
        """Whether a source tensor is known to be no weight."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def _at(name: str, index: int) -> str:
    return name.replace("{i}", str(index))


def _rule_at(rule: Rule, index: int) -> Rule:
    if isinstance(rule, Rename):
        return Rename(_at(rule.target, index))
    return type(rule)(tuple(_at(target, index) for target in rule.targets))


def require(config: dict[str, Any], *names: str) -> list[Any]:
    """The values of fields that config.json must have.

    Raises:
        UserError: naming the first field that is missing.
    """
    for name in names:
        if config.get(name) is None:
            raise UserError(f"config.json: the field {name} is missing.")
    return [config[name] for name in names]


def refuse_unless(config: dict[str, Any], name: str, default: Any, *allowed: Any) -> None:
    """Raises UserError if a field has a value that the converted model would not compute."""
    value = config.get(name, default)
    if value not in allowed:
        expected = " or ".join(map(repr, allowed))
        raise UserError(f"config.json: {name} {value!r} is not supported; expected {expected}.")


def flatten_rope(config: dict[str, Any], theta: str = "rope_theta") -> dict[str, Any]:
    """Lifts transformers 5's nested ``rope_parameters`` to the fields that mlx-lm reads."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name) or {}, dict):
            raise UserError(f"config.json: {name} must be an object, got {config[name]!r}.")
    rope = config.get("rope_parameters") or {}
    fields = {}
    if "rope_theta" in rope:
        fields[theta] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        fields["rotary_pct"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return fields
