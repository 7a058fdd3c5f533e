"""Reading what may be missing or damaged: folders, JSON, safetensors. Every fault is one line."""

import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import UserError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def one_line(error: Exception) -> str:
    """What an error of another library says, in one line of bounded length."""
    text = " ".join(str(error).split())
    return textwrap.shorten(text, 300, placeholder=" ...") if text else type(error).__name__


def is_folder(path_or_repo: str) -> bool:
    """Whether it names a folder on this machine, rather than something on the Hub."""
    return os.path.isdir(os.path.expanduser(path_or_repo))


def find_folder(path_or_repo: str, download: Callable[[str], str | Path]) -> Path:
    """The local folder, downloaded first if it is a Hub id.

    Args:
        path_or_repo: a folder or a Hub id (owner/name).
        download: called with the Hub id; returns the folder.

    Raises:
        UserError: if there is no such folder, or the Hub does not give it.
    """
    if is_folder(path_or_repo):
        return Path(os.path.expanduser(path_or_repo))
    if os.path.exists(os.path.expanduser(path_or_repo)):
        raise UserError(f"{path_or_repo} is a file; give the folder that holds its config.json.")
    if not _HUB_ID.fullmatch(path_or_repo):
        raise UserError(f"{path_or_repo}: no such folder, and not a Hub id (owner/name).")
    return Path(from_hub(path_or_repo, download))


def from_hub(repo: str, call: Callable[[str], Any]) -> Any:
    """What a call to the Hub gives for a repository.

    Raises:
        UserError: if the Hub does not answer, or refuses.
    """
    try:
        return call(repo)
    except Exception as error:  # the Hub's many errors, its HTTP library's among them
        raise UserError(
            f"{repo}: no such folder, and the Hub did not give it: {one_line(error)}"
        ) from None


def read_json(file: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        UserError: if the file is missing, no JSON, or no object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is not readable JSON ({error}).") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold a JSON object.")
    return content


def check_safetensors(file: Path) -> None:
    """Checks that a file is safetensors from its first byte to its last; reads only the header.

    mlx does not name a damaged file, and accepts overlapping tensors and trailing bytes.

    Raises:
        UserError: naming the file.
    """
    try:
        with safe_open(file, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({one_line(error)}); "
            "download or copy it again."
        ) from None
