"""Memory against perplexity: the states of an allocation, as a file and as a picture."""

import json
import math
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json
from ..plots import new_figure
from ..writing import whole_file
from .allocation import Step

CURVE, PICTURE = "budgets.json", "budgets.png"


def share_of_keys(budgets: list[int], tokens: int) -> float:
    """What share of a full cache of ``tokens`` tokens these budgets keep."""
    return sum(min(budget, tokens) for budget in budgets) / (len(budgets) * tokens)


def write_curve(folder: Path, steps: list[Step], about: dict[str, Any]) -> Path:
    """Writes the states, the full cache first, with what they were measured on.

    Args:
        folder: of the model.
        steps: in the order of the allocation; the first one keeps everything.
        about: what the file tells beside them; its ``tokens`` are those of a document.

    Returns:
        The file, ``budgets.json``.

    Raises:
        UserError: if it cannot be written.
    """
    points = [
        {
            "budgets": step.budgets,
            "kept": share_of_keys(step.budgets, about["tokens"]),
            "perplexity": math.exp(step.loss),
        }
        for step in steps
    ]
    with whole_file(folder / CURVE) as file:
        file.write_text(json.dumps(about | {"curve": points}, indent=1) + "\n", encoding="utf-8")
    return folder / CURVE


def budgets_within(folder: Path, max_loss: float) -> list[int]:
    """The smallest budgets of a model's curve whose perplexity rises by no more than a share.

    Args:
        folder: of the model.
        max_loss: such as 0.01 for 1 %.

    Raises:
        UserError: if the model has no curve, or it is damaged.
    """
    file = folder / CURVE
    if not file.is_file():
        raise UserError(
            f"--max-loss needs {file}; mlx-selective budget --model {folder} --data ... makes it."
        )
    try:
        points = [
            (float(point["perplexity"]), float(point["kept"]), list(map(int, point["budgets"])))
            for point in read_json(file)["curve"]
        ]
        most = points[0][0] * (1 + max_loss)
        return min((point for point in points if point[0] <= most), key=lambda point: point[1])[2]
    except (LookupError, TypeError, ValueError):
        raise UserError(f"{file} is not what mlx-selective budget wrote; make it anew.") from None


def draw_curve(
    folder: Path, lines: dict[str, list[tuple[float, float]]], tokens: int
) -> Path | None:
    """Draws how perplexity rises where fewer keys are kept, as ``budgets.png``.

    Args:
        folder: of the model.
        lines: label -> points (share of keys, perplexity), of which the first keeps all.
        tokens: of a document.

    Returns:
        The picture, or None where matplotlib is not installed.
    """
    figure = new_figure(8, 4.5)
    if figure is None:
        return None
    axes = figure.subplots()
    for label, points in lines.items():
        shares, perplexities = zip(*points, strict=True)
        rises = [100 * (perplexity / perplexities[0] - 1) for perplexity in perplexities]
        style = {"marker": "o", "ls": ""} if len(points) < 3 else {}
        axes.plot([100 * share for share in shares], rises, label=label, **style)
    axes.set_xscale("log")
    for give in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        give(lambda value, _: f"{value:g}")
    axes.set_xlabel(f"keys kept of {tokens} (%)")
    axes.set_ylabel("perplexity above that of all keys (%)")
    axes.legend()
    figure.savefig(folder / PICTURE, dpi=120)
    return folder / PICTURE
