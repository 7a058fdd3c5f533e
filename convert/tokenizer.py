"""The tokenizer of a converted folder: complete, and stopping where the model stops."""

import math
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import UserError
from ..files import one_line, read_json
from ..loading import open_tokenizer
from .sentencepiece_tokenizer import write_fast_tokenizer
from .source import companion_files


def write_tokenizer(source: Path, target: Path) -> None:
    """Writes the tokenizer, chat template and generation config of a checkpoint.

    Files are copied as they are. A ``tokenizer.model`` without ``tokenizer.json`` is turned
    into one that gives SentencePiece's own ids (transformers' LlamaTokenizer does not).

    Args:
        source: folder of the checkpoint.
        target: folder being written.

    Raises:
        UserError: if there is no tokenizer, or it is damaged.
    """
    try:
        for file in companion_files(source):
            shutil.copyfile(file, target / file.name)
            if file.suffix == ".jinja":
                file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be copied ({one_line(error)}).") from None
    config_file = source / "tokenizer_config.json"
    config = read_json(config_file) if config_file.is_file() else {}
    if not (source / "tokenizer.json").is_file():
        if not (source / "tokenizer.model").is_file():
            raise UserError(f"{source}: no tokenizer (tokenizer.json or tokenizer.model).")
        # Beside its translation it would only invite transformers to read it in its own way.
        (target / "tokenizer.model").unlink()
        _translate(source / "tokenizer.model", config_file, config, target)
    _check_tokenizer(source, target)


def _translate(model_file: Path, config_file: Path, config: dict[str, Any], target: Path) -> None:
    try:
        write_fast_tokenizer(model_file, config, target)
    except UserError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{config_file}: a field is not as transformers writes it ({one_line(error)})."
        ) from None


def _check_tokenizer(source: Path, target: Path) -> None:
    """Opens the written tokenizer as ``load`` will; a folder that cannot be opened is not whole."""
    try:
        Tokenizer.from_file(str(target / "tokenizer.json"))
    except Exception as error:  # the only type that tokenizers raises
        file = source / "tokenizer.json"
        raise UserError(f"{file} is not a whole tokenizer ({one_line(error)}).") from None
    try:
        open_tokenizer(target)
    except Exception as error:  # transformers' many ways
        file = source / "tokenizer_config.json"
        raise UserError(f"{file}: the tokenizer cannot be opened ({one_line(error)}).") from None


def end_tokens(source: Path, config: dict[str, Any], target: Path) -> int | list[int]:
    """The id or ids that end a text: from the configs, or else the tokenizer's own.

    Args:
        source: folder of the checkpoint.
        config: its config.json.
        target: folder with the written tokenizer.

    Raises:
        UserError: if nothing says so, or no such token exists; generation would never stop.
    """
    generation_file = source / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    holders = {  # generation_config.json first, as mlx-lm and transformers have it
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "tokenizer_config.json": _tokenizer_eos(target),
    }
    for holder, eos in holders.items():
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        size = config.get("vocab_size", math.inf)  # some families nest it
        if not ids or not all(type(i) is int and 0 <= i < size for i in ids):
            raise UserError(
                f"{source / holder}: eos_token_id must be ids below vocab_size {size}, got {eos!r}."
            )
        return eos
    raise UserError(
        f"{source}: neither config.json nor the tokenizer names an end token; "
        "add eos_token_id to config.json."
    )


def _tokenizer_eos(folder: Path) -> int | None:
    config_file = folder / "tokenizer_config.json"
    token = read_json(config_file).get("eos_token") if config_file.is_file() else None
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    return Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(token)
