"""Where a checkpoint comes from: a folder or the Hub; its config, and its weight files."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import mlx.core as mx

from ..errors import UserError
from ..loading import check_safetensors
from .torch_pickle import read_torch_file

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
#: Everything a conversion reads; code and other formats are never downloaded.
_TEXT_FILES = ("*.json", "tokenizer.model", "*.txt", "*.jinja")
_WEIGHT_FILES = ("*.safetensors", "*.bin")


def find_folder(path_or_repo: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded from the Hub if it is a Hub id.

    Only config and tokenizer files are downloaded here, so that an unknown architecture is
    refused before any weight; :func:`fetch_weights` brings the rest.

    Raises:
        UserError: if there is no such folder, or the Hub does not give it.
    """
    path = Path(os.path.expanduser(path_or_repo))
    if os.path.isdir(path):
        return path
    if os.path.exists(path):
        raise UserError(f"{path} is a file; give the folder that holds its config.json.")
    if not _HUB_ID.fullmatch(path_or_repo):
        raise UserError(f"{path_or_repo}: no such folder, and not a Hub id (owner/name).")
    return _download(path_or_repo, revision, _TEXT_FILES)


def fetch_weights(path_or_repo: str, revision: str | None = None) -> None:
    """Downloads the weights of a Hub id into the folder that find_folder gave."""
    if os.path.isdir(os.path.expanduser(path_or_repo)):
        return
    from huggingface_hub import list_repo_files

    names = _hub_call(path_or_repo, list_repo_files, path_or_repo, revision=revision)
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    wanted = _WEIGHT_FILES[:1] if has_safetensors else _WEIGHT_FILES[1:]
    _download(path_or_repo, revision, wanted)


def _download(repo, revision, patterns):
    from huggingface_hub import snapshot_download

    folder = _hub_call(
        repo, snapshot_download, repo, revision=revision, allow_patterns=list(patterns)
    )
    return Path(folder)


def _hub_call(repo, function, *args, **kwargs):
    """Calls the Hub, and tells in one line what went wrong."""
    try:
        return function(*args, **kwargs)
    except Exception as error:  # the Hub's many errors, requests' and httpx's among them
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{repo}: no such folder, and the Hub did not give it: {reason}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        UserError: if the file is missing, no JSON, or no object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not readable JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint: safetensors if there are any, else PyTorch pickles.

    Raises:
        UserError: if there are none, or the index names a file that is missing or outside.
    """
    for single, index, pattern in (
        ("model.safetensors", "model.safetensors.index.json", "model*.safetensors"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model*.bin"),
    ):
        if (folder / index).exists():
            return _indexed_files(folder, index)
        if (folder / single).exists():
            return [folder / single]
        found = sorted(folder.glob(pattern))
        if found:
            raise UserError(
                f"{folder}: {found[0].name} is a shard, but {index} is missing; "
                "download the whole checkpoint."
            )
    raise UserError(f"{folder}: no weights (model.safetensors or pytorch_model.bin).")


def _indexed_files(folder, index):
    weight_map = read_json(folder / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{folder / index}: weight_map must be a non-empty object.")
    for name in weight_map.values():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise UserError(f"{folder / index}: {name!r} is not a file of this folder.")
        if not (folder / name).is_file():
            raise UserError(f"{folder / name}: no such file, although {index} names it.")
    return [folder / name for name in sorted(set(weight_map.values()))]


def _is_plain_name(name: str) -> bool:
    """Whether a name stays in its folder on every operating system."""
    return (
        name not in ("", ".", "..")
        and PurePosixPath(name).name == name
        and PureWindowsPath(name).name == name
    )


def read_tensors(files: list[Path]) -> dict[str, mx.array]:
    """All tensors of a checkpoint, safetensors lazily.

    Raises:
        UserError: naming the file that is damaged, or the tensor that two files hold.
    """
    tensors: dict[str, mx.array] = {}
    for file in files:
        read = read_torch_file if file.suffix == ".bin" else _read_safetensors
        for name, tensor in read(file).items():
            if name in tensors:
                raise UserError(f"{file}: tensor {name} also stands in another file.")
            tensors[name] = tensor
    return tensors


def _read_safetensors(file: Path) -> dict[str, mx.array]:
    check_safetensors(file)
    try:
        return mx.load(str(file), format="safetensors")
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file} cannot be read by mlx ({reason}).") from None


def companion_files(folder: Path) -> Iterator[Path]:
    """The files beside the weights that are copied as they are, if present."""
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
        "tokenizer.model",
        "generation_config.json",
    ):
        if (folder / name).is_file():
            yield folder / name
