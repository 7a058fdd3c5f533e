"""Where a checkpoint comes from: a folder or the Hub; its config, and its weight files."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath

import mlx.core as mx

from ..errors import UserError
from ..files import check_safetensors, find_folder, from_hub, is_folder, one_line, read_json
from .torch_pickle import read_torch_file

#: Everything a conversion reads; code and other formats are never downloaded.
_TEXT_FILES = ("*.json", "tokenizer.model", "*.txt", "*.jinja")
_WEIGHT_FILES = ("*.safetensors", "*.bin")


def find_checkpoint(path_or_repo: str, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded from the Hub if it is a Hub id.

    Only config and tokenizer files are downloaded here, so that an unknown architecture is
    refused before any weight; :func:`fetch_weights` brings the rest.

    Raises:
        UserError: if there is no such folder, or the Hub does not give it.
    """
    return find_folder(path_or_repo, lambda repo: _download(repo, revision, _TEXT_FILES))


def fetch_weights(path_or_repo: str, revision: str | None = None) -> None:
    """Downloads the weights of a Hub id into the folder that find_checkpoint gave."""
    if is_folder(path_or_repo):
        return
    from huggingface_hub import list_repo_files

    names = from_hub(path_or_repo, lambda repo: list_repo_files(repo, revision=revision))
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    wanted = _WEIGHT_FILES[:1] if has_safetensors else _WEIGHT_FILES[1:]
    from_hub(path_or_repo, lambda repo: _download(repo, revision, wanted))


def _download(repo, revision, patterns):
    from huggingface_hub import snapshot_download

    return snapshot_download(repo, revision=revision, allow_patterns=list(patterns))


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
        raise UserError(f"{file} cannot be read by mlx ({one_line(error)}).") from None


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
