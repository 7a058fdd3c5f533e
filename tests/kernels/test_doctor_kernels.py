"""``mlx-selective doctor --kernels``: its table, its verdicts and what it says of a failure."""

import dataclasses
import re

import mlx.core as mx
import pytest
from kernel_files import numpy_temperature

from mlx_selective.cli import main
from mlx_selective.doctor import kernel_cases
from mlx_selective.doctor import kernels as doctor
from mlx_selective.kernels import launched_by, tile_words
from mlx_selective.kernels.choice import FLOATS
from mlx_selective.kernels.source import KERNEL_FOLDER

ALL = {"float32", "float16", "bfloat16"}


@pytest.fixture
def ssa_alone(monkeypatch):
    """The SSA kernel in one head size, timed on few rows."""
    checks = [
        dataclasses.replace(check, head_sizes=(64,), timed=(1, 2, 8))
        for check in kernel_cases.CHECKS
        if check.name == "ssa_temperature"
    ]
    monkeypatch.setattr(doctor, "CHECKS", checks)


def table(text: str) -> dict[str, list[str]]:
    """The rows of the printed table by dtype, split into columns."""
    lines = text.split("\nkernel ", 1)[1].splitlines()
    return {line.split()[1]: line.split() for line in lines if line.startswith("ssa_temperature")}


def run(launcher) -> int:
    with launched_by(launcher):
        return main(["doctor", "--kernels"])


def spoiled(change):
    """numpy_temperature with its output changed."""

    def launcher(kernel, **call):
        (out,) = numpy_temperature(kernel, **call)
        return [change(out)]

    return launcher


def test_a_right_kernel(ssa_alone, capsys):
    assert run(numpy_temperature) == 0
    text = capsys.readouterr().out
    head = text.split("\n\n")[0].splitlines()
    for line in ("mlx ", "python ", "backend ", "chip ", "mlx-selective "):
        assert any(one.startswith(line) for one in head), line
    assert "kernels        metal" in head
    rows = table(text)
    assert list(rows) == ["float32", "float16", "bfloat16"]
    for dtype, floor in doctor.FLOORS.items():
        row = rows[str(dtype).removeprefix("mlx.core.")]
        error, plain, allowed, ms, plain_ms = map(float, row[3:8])
        assert row[2] == "64" and row[8:] == ["ok"]
        assert error == plain and allowed == pytest.approx(2 * plain + floor, rel=0.1)
        assert ms > 0 and plain_ms > 0
    assert text.endswith("3 of 3 ok\n")


@pytest.mark.parametrize(
    "change, failed",
    [
        (lambda out: out * (1 + 1e-6), {"float32"}),
        (lambda out: out * (1 + 2**-7), ALL),
        (lambda out: out * mx.array(float("nan"), out.dtype), ALL),
        (lambda out: mx.where(mx.arange(64) == 63, out * 0, out), ALL),
    ],
)
def test_a_wrong_kernel_fails(change, failed, ssa_alone, capsys):
    assert run(spoiled(change)) == 1
    text = capsys.readouterr().out
    assert {dtype for dtype, row in table(text).items() if row[-1] == "FAILED"} == failed
    assert text.endswith(f"{3 - len(failed)} of 3 ok\n")


def test_the_outputs_of_the_check_start_as_nan(ssa_alone, capsys):
    started = []

    def launcher(kernel, **call):
        started.append(call.get("init_value"))
        return numpy_temperature(kernel, **call)

    assert run(launcher) == 0
    assert sum(value is not None and value != value for value in started) == 3
    assert None in started  # the timed ones do not


def test_a_compilers_message_is_shown_and_the_others_go_on(ssa_alone, capsys):
    message = "\n".join(["Unable to build metal library", *(f"line {n}\x1b[2J" for n in range(50))])

    def launcher(kernel, **call):
        if call["inputs"][0].dtype != mx.bfloat16:
            raise RuntimeError(message)
        return numpy_temperature(kernel, **call)

    assert run(launcher) == 1
    text = capsys.readouterr().out
    rows = table(text)
    assert rows["float32"][3:] == rows["float16"][3:] == ["-"] * 5 + ["FAILED"]
    assert rows["bfloat16"][-1] == "ok"
    assert "    Unable to build metal library\n    line 0[2J\n" in text
    assert "line 10[2J\n" in text and "line 11" not in text and "\x1b" not in text
    # the second time in short
    assert text.count("line 0[2J") == 2 and text.count("line 1[2J") == 1
    assert text.endswith("1 of 3 ok\n")


def test_a_kernel_that_is_not_chosen_fails(ssa_alone, monkeypatch, capsys):
    (check,) = doctor.CHECKS
    monkeypatch.setattr(doctor, "CHECKS", [dataclasses.replace(check, head_sizes=(48,))])
    assert run(numpy_temperature) == 1
    assert "The kernel was not chosen: head size 48." in capsys.readouterr().out


def test_without_a_backend_one_line_says_so(capsys):
    if mx.default_device() != mx.cpu:
        pytest.skip("kernels run on this machine")
    assert main(["doctor", "--kernels"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "No kernels run here: MLX computes on the CPU. All methods run in plain MLX."


def test_switched_off_one_line_says_so(monkeypatch, capsys):
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    assert run(numpy_temperature) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("No kernels run here: MLX_SELECTIVE_KERNELS is off.")


def test_every_kernel_of_the_package_is_checked():
    files = [file.read_text() for file in KERNEL_FOLDER.rglob("*.metal")]
    kernels = [re.search(r"\[\[kernel\]\] void (\w+)\(", text)[1] for text in files]
    checked = [name for check in kernel_cases.CHECKS for name in check.parts or (check.name,)]
    assert sorted(set(checked)) == sorted(kernels)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("spoiled", range(len(tile_words.NAMES)), ids=tile_words.NAMES)
@pytest.mark.parametrize("factor", [float("nan"), 1.01])
def test_each_word_of_the_tiles_is_judged_alone(spoiled, factor, dtype, monkeypatch, capsys):
    """Seven of the eight are float32 whatever the operands: one percent is far too much."""

    def launcher(kernel, inputs, **_):
        results = tile_words.plain_tile_words(*inputs[:3])
        results[spoiled] = results[spoiled] * mx.array(factor, results[spoiled].dtype)
        return results

    (check,) = (one for one in kernel_cases.CHECKS if one.name == "tile_words")
    monkeypatch.setattr(doctor, "CHECKS", [check])
    monkeypatch.setattr(doctor, "_ROUNDS", range(1, 2))
    monkeypatch.setattr(kernel_cases, "FLOATS", [dtype])
    name = tile_words.NAMES[spoiled]
    assert run(launcher) == 1
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "tile_words" in line)
    assert row.endswith(f"FAILED {name}")
    assert ("nan" in row) == (factor != factor)
