"""How a checkpoint layout is described: one declarative weight map, and what its config means."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx

from ...errors import UserError


@dataclass(frozen=True)
class Rename:
    """One tensor becomes one tensor, unchanged."""

    target: str

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of the parameters that :meth:`apply` gives, in its order: one."""
        return (self.target,)

    def apply(self, tensor: mx.array, heads: int, shapes: list[tuple]) -> list[mx.array]:
        """The tensor as it is, in a list of one.

        Args:
            tensor: of the parameter's shape.
            heads: query heads H; not needed.
            shapes: the shape of the one parameter; not needed.
        """
        return [tensor]


@dataclass(frozen=True)
class PerHead:
    """Rows are stored key head by key head: its query heads, then the key, then the value.

    (Hkv, H / Hkv + 2, D) rows.

    Args:
        targets: the parameters in the order that :meth:`apply` gives them: the projections of
            queries, keys and values.
    """

    targets: tuple[str, ...]

    def apply(self, tensor: mx.array, heads: int, shapes: list[tuple]) -> list[mx.array]:
        """Sorts the rows into a part for each target.

        Args:
            tensor: the fused weight ((H + 2 Hkv) * D, C) or bias ((H + 2 Hkv) * D,).
            heads: query heads H.
            shapes: those of the targets, (H * D, C), (Hkv * D, C) and (Hkv * D, C),
                or without C.

        Returns:
            The parts, of these shapes; the heads of each keep their order.
        """
        queries, keys, *_ = (shape[0] for shape in shapes)
        key_heads, rest = heads * keys // queries, tensor.shape[1:]
        counts = [shape[0] // key_heads for shape in shapes]
        by_key_head = tensor.reshape(key_heads, sum(counts), *rest)
        parts = mx.split(by_key_head, list(accumulate(counts))[:-1], axis=1)
        return [part.reshape(-1, *rest) for part in parts]


@dataclass(frozen=True)
class Stacked:
    """Equal blocks of rows, one after another.

    Args:
        targets: the parameters in the order of their blocks, as :meth:`apply` gives them.
    """

    targets: tuple[str, ...]

    def apply(self, tensor: mx.array, heads: int, shapes: list[tuple]) -> list[mx.array]:
        """Cuts the rows into a block for each target.

        Args:
            tensor: (n * R, ...) for n targets of R rows.
            heads: query heads H; not needed.
            shapes: those of the targets, each (R, ...); not needed.

        Returns:
            n blocks (R, ...).
        """
        return mx.split(tensor, len(self.targets), axis=0)


Rule = Rename | PerHead | Stacked


@dataclass(frozen=True)
class Layout:
    """A checkpoint format that can be converted.

    Args:
        name: what people call it.
        model_types: values of ``model_type`` in its config.json.
        base_model_type: the mlx-lm model that computes it, or None where config.json tells.
        weights: source name -> rule; ``{i}`` stands for the layer index. None: the tensors have
            the names of the model's parameters.
        config: turns the source's config.json into the fields of the mlx-lm model.
        attention: the attention settings that the source's config.json implies, or None where
            it does not tell (then ``--attention`` does, and ``softmax`` is the default).
        attention_by_tensors: the attention settings that config.json leaves open and the names
            of the tensors tell.
        ignored: regular expressions of tensors that are no weights, such as buffers.
        field_names: mlx-lm's name of a config field -> the source's, where they differ.
        hints: regular expressions of tensors -> what to do where one is missing or left over.
    """

    name: str
    model_types: tuple[str, ...]
    base_model_type: str | None
    weights: Mapping[str, str | PerHead | Stacked] | None
    config: Callable[[dict[str, Any]], dict[str, Any]]
    attention: Callable[[dict[str, Any]], dict[str, Any] | None] = field(
        default=lambda config: None
    )
    attention_by_tensors: Callable[[dict[str, Any], Iterable[str]], dict[str, Any]] = field(
        default=lambda config, names: {}
    )
    ignored: tuple[str, ...] = ()
    field_names: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)

    def rules(self, layers: int, parameters: Iterable[str]) -> Iterator[tuple[str, Rule]]:
        """Every source name with its rule, for a model of so many layers and these parameters."""
        if self.weights is None:
            yield from ((name, Rename(name)) for name in parameters)
            return
        for source, rule in self.weights.items():
            rule = Rename(rule) if isinstance(rule, str) else rule
            for index in range(layers) if "{i}" in source else [0]:
                yield _at(source, index), _rule_at(rule, index)

    def is_ignored(self, name: str) -> bool:
        """Whether a source tensor is known to be no weight."""
        return any(re.search(pattern, name) for pattern in self.ignored)

    def hint(self, name: str) -> str:
        """What to do where this tensor is missing or left over: " ..." or nothing."""
        hints = (hint for pattern, hint in self.hints.items() if re.search(pattern, name))
        return "".join(f" {hint}" for hint in hints)


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
