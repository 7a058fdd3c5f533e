"""Values of a module, exchanged for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exchanged(module: Any, **values: Any) -> Iterator[None]:
    """Gives names of a module other values, and takes them back at the end.

    Raises:
        AttributeError: if the module has no such name; mlx-lm would go on with its own.
    """
    before = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
