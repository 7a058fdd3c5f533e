"""Ways to damage a checkpoint or a model folder, and what a refusal must look like."""

import json
from pathlib import Path

from safetensors.numpy import load_file, save_file
from tiny_checkpoints import write_json

from mlx_selective.cli import main

INDEX = "model.safetensors.index.json"


def files(folder: Path) -> dict[str, bytes | None]:
    """Everything that stands in a folder, at any depth."""
    paths = sorted(folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def one_line(capfd, command: str) -> str:
    printed = capfd.readouterr()
    assert "Traceback" not in printed.out
    lines = printed.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"mlx-selective {command}: error: "), printed.err
    return lines[0]


def refusal(folder: Path, capfd, source, *flags, target: Path | None = None) -> str:
    """Runs convert, which must leave a folder as it is; gives the line that refuses the source."""
    target = target or folder / "out" / "model"
    before = files(folder)
    arguments = ["--hf-path", str(source), "--mlx-path", str(target), *flags]
    assert main(["convert", *arguments]) == 2
    assert files(folder) == before
    return one_line(capfd, "convert")


# Each gives a function that damages a folder ------------------------------------------------------


def config(**fields):
    """Changes fields of config.json; None takes one away."""

    def damage(folder: Path) -> None:
        file = folder / "config.json"
        changed = json.loads(file.read_text()) | fields
        write_json(file, {name: value for name, value in changed.items() if value is not None})

    return damage


def text(name: str, content: str | bytes):
    content = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(content)


def remove(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def tensors(changes: dict):
    """Changes tensors; None takes one away."""

    def damage(folder: Path) -> None:
        file = folder / "model.safetensors"
        changed = load_file(file) | changes
        save_file({name: v for name, v in changed.items() if v is not None}, file)

    return damage


def cut(name: str, keep: float):
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def longer(name: str):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\0" * 8)


def indexed(name: object):
    """Sends one tensor of the index to another file."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["model.norm.weight"] = name
        write_json(folder / INDEX, index)

    return damage


def both(*damages):
    return lambda folder: [damage(folder) for damage in damages]


def sizes(field: str):
    """Values that no size can have."""
    values = {"huge": 10**9, "zero": 0, "negative": -2, "bool": True, "string": "2", "float": 2.0}
    values["list"] = [2]
    return {
        f"{field} {kind}": (config(**{field: value}), f"config.json: {field} must be", repr(value))
        for kind, value in values.items()
        if not (kind == "huge" and field == "max_position_embeddings")
    }


#: code of a folder that leaves a trace where it is run
EVIL = "from pathlib import Path\nPath(__file__).with_name('executed').touch()\n"


def model_with_code(code: str = EVIL):
    """A model of a type that mlx-lm does not have, with a file of code that builds it."""
    return both(config(model_type="x", model_file="evil.py"), text("evil.py", code))


def tokenizer_with_code(code: str = EVIL):
    """A tokenizer whose class is in a file of the folder."""
    classes = {"AutoTokenizer": ["evil.T", "evil.T"]}
    settings = json.dumps({"tokenizer_class": "T", "auto_map": classes})
    return both(text("evil.py", code), text("tokenizer_config.json", settings))
