"""Files that are whole or not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import UserError
from .files import one_line


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of ``path`` when it is on the disk.

    Args:
        path: of the file; what stands there stays until then.

    Raises:
        UserError: naming the file, if it cannot be written; nothing half-written is left.
    """
    # MLX adds .safetensors to any other ending
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except (OSError, RuntimeError) as error:
        raise UserError(f"{path} cannot be written: {one_line(error)}") from None
    finally:
        with suppress(OSError):  # it is not there, nor perhaps its folder
            partial.unlink()
