"""docs/first-run-on-a-mac.md says what the commands do."""

import re
from pathlib import Path

import pytest

from mlx_selective.cli import COMMANDS, main
from mlx_selective.doctor.checks import TOLERANCE
from mlx_selective.doctor.kernel_cases import CHECKS
from mlx_selective.doctor.kernels import FLOORS
from mlx_selective.kernels import SETTING
from mlx_selective.kernels.backend import VALUES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "first-run-on-a-mac.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_its_commands_exist(capsys):
    lines = re.findall(r"mlx-selective (\w+)(.*)$", "\n".join(code_blocks()), re.M)
    assert {command for command, _ in lines} == {"chat", "doctor", "generate"} <= set(COMMANDS)
    for command, rest in lines:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = re.findall(r"--[a-z][\w-]*", capsys.readouterr().out)
        assert set(re.findall(r"--[a-z][\w-]*", rest)) <= set(known)


def code_blocks():
    return re.findall(r"```bash\n(.*?)```", PAGE, re.S)


def test_its_figures_are_the_codes():
    for dtype, floor in FLOORS.items():
        assert f"{floor:g} in {str(dtype).removeprefix('mlx.core.')}" in PAGE
    assert f"`ok` up to {TOLERANCE:.0e}".replace("e-0", "e-") in PAGE
    rows = sum(len(check.cases()) for check in CHECKS)
    assert f"`{rows} of {rows} ok`" in PAGE
    timed = {check.name: check.timed for check in CHECKS}
    assert timed.pop("tile_words") == (1, 1, 32)
    for name in ("selective_decode", "stick_breaking_decode"):
        assert timed.pop(name) == (1, 16, 4096)
    assert set(timed.values()) == {(1, 16, 2048)}
    assert "16 heads of 2048 tokens" in PAGE


def test_every_kernel_is_explained():
    for check in CHECKS:
        assert f"`{check.name}`: " in PAGE


def test_the_setting_is_in_the_readme():
    (paragraph,) = re.findall(rf"environment variable `{SETTING}`.*?\n\n", README, re.S)
    assert all(f"`{value}`" in paragraph for value in VALUES)
    assert f"{SETTING}=off" in PAGE
