"""The wheel, installed in a clean environment outside the checkout, runs everything."""

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from tiny_checkpoints import llama

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("mlx_selective", "convert", "metal", "pyproject.toml", "README.md", "LICENSE", "chat.py")


def run(*command, cwd, **options):
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=540, **options
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the sources, so that no stale build folder takes part."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(source, tree / name, ignore=ignore)
        else:
            shutil.copy(source, tree / name)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out), str(tree)]
    built = run(*pip, cwd=tree)
    if built.returncode and "CI" not in os.environ:
        pytest.skip(f"no wheel without the build backend from PyPI: {built.stderr[-200:]}")
    assert built.returncode == 0, built.stderr
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The bin folder of a clean environment that holds the wheel and its dependencies."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    result = run(str(folder / "bin" / "pip"), "install", "-q", str(wheel), cwd=folder)
    if result.returncode and "CI" not in os.environ:
        pytest.skip(f"the dependencies could not be installed: {result.stderr[-200:]}")
    assert result.returncode == 0, result.stderr
    return folder / "bin"


def test_holds_the_whole_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {
        "mlx_selective",
        "mlx_selective-0.1.0.dist-info",
    }
    places = {"mlx_selective": ROOT / "mlx_selective"}
    places |= {f"mlx_selective/{part}": ROOT / part for part in ("convert", "metal")}
    for inside, folder in places.items():
        for file in folder.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                assert f"{inside}/{file.relative_to(folder).as_posix()}" in names
    assert wheel.stat().st_size < 12e6


def test_runs_outside_the_checkout(installed, tmp_path):
    command = str(installed / "mlx-selective")
    doctor = run(command, "doctor", cwd=tmp_path)
    assert doctor.returncode == 0, doctor.stderr
    assert doctor.stdout.count("  ok") == 3

    chat = run(command, "chat", "-m", "20", cwd=tmp_path, input="Have you seen a good movie?\n")
    assert chat.returncode == 0, chat.stderr
    assert len(chat.stdout.split()) >= 2

    prompt = "Once upon a time"
    flags = ["--prompt", prompt, "-m", "12", "--budget", "8", "--format", "json"]
    generated = run(command, "generate", *flags, cwd=tmp_path)
    assert json.loads(generated.stdout)["cache"]["kept"] == 8

    wrong = run(command, "convert", "--hf-path", "nowhere", cwd=tmp_path)
    assert wrong.returncode == 2
    assert wrong.stderr.count("\n") == 1 and "nowhere" in wrong.stderr
    assert list(tmp_path.iterdir()) == []


def test_installs_no_top_level_convert_or_chat(installed, tmp_path):
    for name in ("convert", "chat", "metal"):
        result = run(str(installed / "python"), "-c", f"import {name}", cwd=tmp_path)
        assert f"No module named '{name}'" in result.stderr


def test_converts_with_the_installed_command(installed, tmp_path):
    """All that convert needs is in the wheel; the folder opens with stock mlx-lm too."""
    llama().save(tmp_path / "source", form="bin", tokenizer="sentencepiece")
    flags = ["--hf-path", "source", "--mlx-path", "model", "--attention", "selective"]
    converted = run(str(installed / "mlx-selective"), "convert", *flags, cwd=tmp_path)
    assert converted.returncode == 0, converted.stderr
    options = ["--model", "model", "--prompt", "ab", "--trust-remote-code", "-m", "3"]
    stock = run(str(installed / "mlx_lm.generate"), *options, cwd=tmp_path)
    assert stock.returncode == 0, stock.stderr
    assert "Generation: " in stock.stdout
