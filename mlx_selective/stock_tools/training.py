"""mlx-lm's LoRA training, with its data checked line by line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import UserError
from ..loading import open_adapters
from .exchange import exchanged


def train(lora: Any) -> None:
    """Trains or tests as the flags say.

    Args:
        lora: the module ``mlx_lm.lora``.

    Raises:
        UserError: naming the file of settings, or of data with its line, that is wrong.
    """
    load_dataset, load_yaml = lora.load_dataset, lora.yaml.load

    def load_checked(args, tokenizer):
        if not getattr(args, "hf_dataset", None):
            check_data(args)
        return load_dataset(args, tokenizer)

    def load_settings(file, loader):
        settings = load_yaml(file, loader)
        if not isinstance(settings, dict):
            raise UserError(f"--config {file.name} must hold lines of the form name: value.")
        for name in settings:
            if not isinstance(name, str):
                raise UserError(f"--config {file.name}: {name!r} is no setting.")
        return settings

    parts = {"load_adapters": open_adapters, "yaml": SimpleNamespace(load=load_settings)}
    with exchanged(lora, load_dataset=load_checked, **parts):
        lora.main()


def check_data(args: Any) -> None:
    """Checks the ``train|valid|test.jsonl`` of ``--data``; a Hub id is left to mlx-lm.

    Args:
        args: the settings of mlx_lm.lora.

    Raises:
        UserError: naming the file, the line and what is wrong with it.
    """
    folder = Path(args.data)
    if folder.is_file():
        raise UserError(f"--data {folder} is a file; give the folder that holds train.jsonl.")
    if not folder.exists():
        try:
            import datasets  # noqa: F401
        except ImportError:
            raise UserError(
                f"--data {folder}: no such folder (for a dataset of the Hub: pip install datasets)."
            ) from None
    if folder.is_dir() and getattr(args, "train", False) and not (folder / "train.jsonl").is_file():
        raise UserError(f"--data {folder} holds no file train.jsonl.")
    for file in (folder / f"{part}.jsonl" for part in ("train", "valid", "test")):
        if file.is_file():
            read_examples(file, args)


def read_examples(file: Path, args: Any = None) -> list[dict[str, Any]]:
    """The lines of a file of data, checked.

    Args:
        file: lines of JSON in one of mlx-lm's forms; the first line's is that of all.
        args: settings that name other fields, as in mlx_lm.lora; None for mlx-lm's own names.

    Raises:
        UserError: naming the file, the line and what is wrong with it.
    """
    # mlx-lm's own order: the first kind that the first example has is the kind of all.
    prompt, completion, chat, text = (
        getattr(args, f"{part}_feature", None) or name
        for part, name in {
            **{"prompt": "prompt", "completion": "completion"},
            **{"chat": "messages", "text": "text"},
        }.items()
    )
    kinds = ({prompt: str, completion: str}, {chat: list}, {text: str})
    parts: dict[str, type] = {}
    examples: list[dict[str, Any]] = []
    number = 0
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.startswith("\ufeff"):
                    raise UserError(f"{file} begins with a byte order mark; save it without one.")
                if not line.strip():
                    raise UserError(f"{file}, line {number} is empty; take it away.")
                example = json.loads(line)
                if not isinstance(example, dict):
                    raise UserError(f"{file}, line {number}: not a JSON object.")
                if number == 1:
                    parts = next((kind for kind in kinds if kind.keys() <= example.keys()), {})
                    if not parts:
                        forms = "; ".join(" and ".join(kind) for kind in kinds)
                        raise UserError(f"{file}, line 1: none of the forms it may have: {forms}.")
                for part, kind in parts.items():
                    if not _is_whole(example.get(part), kind):
                        what = "text" if kind is str else "a list of objects with role and content"
                        raise UserError(f"{file}, line {number}: {part!r} must be {what}.")
                examples.append(example)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}, line {number or 1}: not JSON ({error}).") from None
    if not number:
        raise UserError(f"{file} holds no examples; fill it or take it away.")
    return examples


def _is_whole(value: Any, kind: type) -> bool:
    """Whether it is text, or messages, and not empty."""
    if not isinstance(value, kind) or not value:
        return False
    return kind is str or all(map(_is_message, value))


def _is_message(message: Any) -> bool:
    """Whether it says who says something, and what; calls of tools may take its place."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return False
    return isinstance(message.get("content"), (str, list)) or bool(message.get("tool_calls"))
