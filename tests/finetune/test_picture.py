"""The picture of a training: what stands in the file is what is drawn."""

import json
import sys

import pytest

from mlx_selective.finetune import picture
from mlx_selective.finetune.progress import CURVE

matplotlib = pytest.importorskip("matplotlib")

POINTS = [
    {"iteration": 0, "val_loss": 3.5},
    {"iteration": 1, "train_loss": 3.4, "keys_needed": [0.9, 0.5]},
    {"iteration": 2, "train_loss": 3.1, "keys_needed": [0.7, 0.3]},
    {"iteration": 2, "val_loss": 3.2},
]


def write(folder, points):
    (folder / CURVE).write_text("".join(json.dumps(point) + "\n" for point in points))


def lines(folder, monkeypatch):
    """What is drawn, by label."""
    from matplotlib.figure import Figure

    drawn, save = {}, Figure.savefig

    def look(figure, *arguments, **options):
        for axes in figure.axes:
            for line in axes.get_lines():
                drawn[line.get_label()] = list(zip(*line.get_data(), strict=True))
        return save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", look)
    file = picture.draw(folder)
    assert file == folder / picture.PICTURE
    assert file.read_bytes().startswith(b"\x89PNG")
    return drawn


def test_losses_and_needed_keys(tmp_path, monkeypatch):
    write(tmp_path, POINTS)
    drawn = lines(tmp_path, monkeypatch)
    assert drawn["training"] == [(1, 3.4), (2, 3.1)]
    assert drawn["validation"] == [(0, 3.5), (2, 3.2)]
    assert drawn["mean of the layers"] == [(1, pytest.approx(70)), (2, pytest.approx(50))]
    assert len(drawn) == 5  # and one for each layer


def test_without_selective_attention(tmp_path, monkeypatch):
    write(tmp_path, [{"iteration": 1, "train_loss": 2.0}])
    assert lines(tmp_path, monkeypatch) == {"training": [(1, 2.0)]}


def test_nothing_to_draw_and_nothing_to_draw_with(tmp_path, monkeypatch):
    write(tmp_path, [])
    assert picture.draw(tmp_path) is None
    write(tmp_path, POINTS)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert picture.draw(tmp_path) is None
