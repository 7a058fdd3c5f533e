"""What a person sees of a training: its lines, when it will end, and its curve."""

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import UserError
from ..files import one_line
from .objective import GAIN, KEEP, NEEDED, UNREPORTED, hold

CURVE = "losses.jsonl"


class Progress:
    """mlx-lm's training callback: prints a line for each report and keeps the curve in a file.

    Args:
        model: whose needed keys are told, where it holds them.
        folder: of the adapter, where the curve is.
        last: the iteration that ends the training.
        done: iterations before this start; later ones of a stopped training leave the curve.
        other: a callback that is told the same, such as Weights & Biases'.
    """

    def __init__(self, model: nn.Module, folder: Path, last: int, done: int, other: Any = None):
        self._other = other
        self._model, self._last = model, last
        self._file = folder / CURVE
        # kept here until the first weights are saved: what another training left stays so long;
        # what was validated after the last iteration that is done is about to be again
        self._points = [
            point
            for point in (read_curve(folder) if done else [])
            if point["iteration"] < done + ("train_loss" in point)
        ]
        self._begin, self._done, self._saved = time.monotonic(), done, False

    def on_train_loss_report(self, report: dict[str, Any]) -> None:
        """One line of training: the loss, what layers still need, speed, memory, the end."""
        # mlx-lm's mean begins where this start began, perhaps in the middle of a report
        total, count = mx.distributed.all_sum(self._model[UNREPORTED], stream=mx.cpu).tolist()
        hold(self._model, **{UNREPORTED: [0.0, 0.0]})
        report = report | {"train_loss": total / count}
        if not math.isfinite(report["train_loss"]):
            raise UserError(
                f"after iteration {report['iteration']} the loss is no number; nothing more is "
                "saved. Lower --learning-rate, or look at what else the settings multiply."
            )
        iteration, point = report["iteration"], {"train_loss": report["train_loss"]}
        parts = [f"Train loss {report['train_loss']:.3f}"]
        if NEEDED in self._model:
            needed = self._model[NEEDED].tolist()
            point["keys_needed"] = needed
            layers = " ".join(f"{100 * one:.0f}" for one in needed)
            parts.append(f"Keys needed {sum(needed) / len(needed):.1%} ({layers})")
        for name, label, form in ((GAIN, "Gain", ".2f"), (KEEP, "Budget", "d")):
            if name in self._model:
                point[label.lower()] = self._model[name].item()
                parts.append(f"{label} {point[label.lower()]:{form}}")
        parts += [
            f"Learning Rate {report['learning_rate']:.3e}",
            f"Tokens/sec {report['tokens_per_second']:.1f}",
            f"Peak mem {report['peak_memory']:.3f} GB",
            f"{self._left(iteration)} left",
        ]
        print(f"Iter {iteration}: " + ", ".join(parts), flush=True)
        if self._other is not None:
            self._other.on_train_loss_report(report)
        self._keep({"iteration": iteration, **point})

    def on_val_loss_report(self, report: dict[str, Any]) -> None:
        """One line of validation, before the iteration that it is told for."""
        iteration = report["iteration"] + 1
        took = f"Val took {report['val_time']:.3f}s"
        print(f"Iter {iteration}: Val loss {report['val_loss']:.3f}, {took}", flush=True)
        if self._other is not None:
            self._other.on_val_loss_report(report)
        self._keep({"iteration": report["iteration"], "val_loss": report["val_loss"]})

    def _left(self, iteration: int) -> str:
        spent = time.monotonic() - self._begin
        left = spent / max(1, iteration - self._done) * (self._last - iteration)
        minutes, seconds = divmod(round(left), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

    def _keep(self, point: dict[str, Any]) -> None:
        self._points.append(point)
        if self._saved:
            self.save()

    def save(self) -> None:
        """Writes the points so far, and from now on each as it comes.

        Raises:
            UserError: if they cannot be written.
        """
        try:
            with self._file.open("a" if self._saved else "w", encoding="utf-8") as file:
                file.writelines(json.dumps(one) + "\n" for one in self._points)
        except OSError as error:
            raise UserError(f"{self._file} cannot be written: {one_line(error)}") from None
        self._points, self._saved = [], True


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """The points of ``losses.jsonl`` that are whole; none where there is no such file."""
    points = []
    try:
        lines = (folder / CURVE).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            point = json.loads(line)
            if isinstance(point["iteration"], int):
                points.append(point)
        except (ValueError, TypeError, LookupError):
            pass
    return points


class Silent:
    """In place of mlx-lm's own lines of a training."""

    def __init__(self, *args: Any, **options: Any):
        pass

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def val_task(self, total: int) -> Any:
        """Counts nothing."""
        return nullcontext(lambda: None)

    def advance(self, *_: Any) -> None:
        """Says nothing, as all that follows."""

    report_train = report_val = report_save = advance
