"""The README stays true: its Python runs, its map is the tree, its figures are the tests'."""

import re
from pathlib import Path

import pytest
import readme_commands

import mlx_selective
from mlx_selective.cli import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "index, code", list(enumerate(re.findall(r"```python\n(.*?)```", README, re.S)))
)
def test_python_runs(index, code, capsys):
    scope = {}
    exec(compile(code, f"README.md, block {index}", "exec"), scope)
    if index == 0:
        assert re.match(r"32 of \d+ tokens kept in each layer, 0\.\d+ MB", capsys.readouterr().out)
        assert isinstance(scope["text"], str)
    else:
        assert scope["output"].shape == (1, 4, 10, 16)


def test_commands_exist():
    used = set(re.findall(r"^mlx-selective (\w+)", README, re.M))
    assert used == set(COMMANDS)
    for name in ("chat", "test", "lint"):
        assert readme_commands.block(name).strip()


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_exist(command, capsys):
    """Every flag in a README line of a command is one of its flags."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    known = set(re.findall(r"--?[a-z][\w-]*", capsys.readouterr().out))
    for line in re.findall(rf"^mlx-selective {command}\b(.*)$", README, re.M):
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", line)) <= known


def test_map_is_the_tree():
    """Every path of the map exists, and every module of the tree stands in it or its folder."""
    lines = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.S).group(1).splitlines()
    folders, mapped = {}, set()
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:\S+(?:  )?)+)", line).group(1).split()
        names = [name for name in names if re.fullmatch(r"[\w.]+/?|\S+\.py", name)][
            : 4 if "/  " in line else 1
        ]
        for name in names:
            path = Path(*[folders[d] for d in range(depth)], name)
            assert (ROOT / path).exists(), path
            mapped.add(str(path))
        folders[depth] = names[0]
    for folder in ("mlx_selective", "convert"):
        for entry in (ROOT / folder).iterdir():
            if entry.name.startswith("_") or entry.suffix not in ("", ".py"):
                continue
            if entry.is_dir() and not any(entry.glob("*.py")):
                continue
            named = str(entry.relative_to(ROOT)) in mapped or entry.name in README
            assert named or entry.name in ("errors.py", "command.py", "py.typed"), entry


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_public_names_are_listed_once_and_exist():
    assert set(mlx_selective.__all__) == set(mlx_selective._PUBLIC)
    for name in mlx_selective.__all__:
        assert getattr(mlx_selective, name).__doc__, name
