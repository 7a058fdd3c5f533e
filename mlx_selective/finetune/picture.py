"""The curve of a training as a picture: its losses, and the keys that layers still needed."""

from pathlib import Path
from typing import Any

from ..plots import new_figure
from .progress import read_curve

PICTURE = "losses.png"


def draw(folder: Path) -> Path | None:
    """Draws ``losses.jsonl`` of an adapter's folder as ``losses.png``.

    Args:
        folder: of the adapter.

    Returns:
        The picture, or None where matplotlib is not installed or nothing was reported.
    """
    points = read_curve(folder)
    needs = [point for point in points if "keys_needed" in point]
    figure = new_figure(8, 6 if needs else 3.5) if points else None
    if figure is None:
        return None
    losses, *rest = figure.subplots(1 + bool(needs), sharex=True, squeeze=False)[:, 0]
    for name, label in (("train_loss", "training"), ("val_loss", "validation")):
        _line(losses, points, name, label)
    losses.set_ylabel("loss (nats per token)")
    losses.legend()
    if needs:
        _needed(rest[0], needs)
    (rest[0] if needs else losses).set_xlabel("iteration")
    figure.savefig(folder / PICTURE, dpi=120)
    return folder / PICTURE


def _line(axes: Any, points: list[dict], name: str, label: str) -> None:
    own = [point for point in points if name in point]
    if own:
        marker = "o" if len(own) < 30 else ""
        iterations = [point["iteration"] for point in own]
        axes.plot(iterations, [point[name] for point in own], marker=marker, ms=3, label=label)


def _needed(axes: Any, points: list[dict]) -> None:
    """Each layer's share of keys, the first layer darkest, and their mean."""
    iterations = [point["iteration"] for point in points]
    layers = list(zip(*(point["keys_needed"] for point in points), strict=True))
    for number, layer in enumerate(layers):
        shade = 0.25 + 0.6 * number / len(layers)
        axes.plot(iterations, [100 * one for one in layer], color=(shade, shade, shade), lw=1)
    mean = [100 * sum(one) / len(one) for one in zip(*layers, strict=True)]
    axes.plot(iterations, mean, color="C3", lw=2, label="mean of the layers")
    axes.set_ylabel("keys still needed (%)")
    axes.set_ylim(0, 105)
    axes.legend()
