"""Values of a module, exchanged for a while."""

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def exchanged(module: Any, **values: Any) -> Iterator[None]:
    """Gives names of a module other values, and takes them back at the end.

    A builtin, which a module only reads, is given to it for as long.

    Raises:
        AttributeError: if the module has no such name; mlx-lm would go on with its own.
    """
    own = [name for name in values if not hasattr(builtins, name) or name in vars(module)]
    before = {name: getattr(module, name) for name in own}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(module, name, before[name])
            else:
                delattr(module, name)
