"""Writing a folder that appears only when it is whole."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import UserError
from ..files import one_line


def check_free(target: Path) -> None:
    """Raises UserError if something stands at the target already, as mlx-lm refuses it."""
    if os.path.lexists(target):
        raise UserError(
            f"Cannot save to the path {target} as it already exists. "
            "Please delete the file/directory or specify a new path to save to."
        )


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turns a failure to write (no space, no permission) into one line that names the target.

    Raises:
        UserError: on an OSError, or a RuntimeError, by which mlx tells a full disk.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"{target}: cannot be written ({reason}).") from None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside the target that takes its place on success, in one step.

    On any exception, Ctrl-C included, it is removed and nothing stands at the target.

    Args:
        target: a path where nothing stands yet.

    Raises:
        UserError: if the folder cannot be made or put in place.
    """
    check_free(target)
    partial, made = None, []
    try:
        with writing(target):
            made = [folder for folder in target.parents if not folder.exists()]
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        yield partial
        with writing(target):
            partial.chmod(0o755)
            _sync(partial)
            check_free(target)
            os.rename(partial, target)
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
        _remove_empty(made)


def _remove_empty(folders: list[Path]) -> None:
    """Takes back folders, innermost first, in which nothing came to stand."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _sync(folder: Path) -> None:
    """Brings every file to the disk, so that the rename never shows a hollow folder."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
