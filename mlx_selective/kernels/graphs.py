"""Functions of arrays whose graph MLX keeps, for calls that take longer to build than to run."""

import threading
from collections.abc import Callable, Hashable
from functools import lru_cache

import mlx.core as mx

from .hooks import is_watched

#: graphs that a thread keeps: more than there are layers with budgets of their own. A cache that
#: grows needs a new one for each token, traced in its first layer: about 75 us, where each layer
#: after it saves 20.
KEPT = 256


class Graphs(threading.local):
    """Functions by their settings, each compiled: MLX traces it once a thread and stream.

    In a plain call MLX writes out a kernel's whole source and copies it. A graph of
    ``mx.compile`` holds on to it, so that a later call has only the new arrays to put in.

    Each thread has graphs of its own: MLX keeps them by thread and by a function's address,
    which, once freed by another thread, could be found again by a function that is not its own.

    Args:
        make: ``make(*settings)`` gives a function of arrays, which takes derivatives as well:
            where MLX traces a call for those, it sees the function itself.
    """

    def __init__(self, make: Callable[..., Callable]):
        self._make = make
        self._compiled = lru_cache(maxsize=KEPT)(lambda *settings: mx.compile(make(*settings)))

    def __call__(self, *settings: Hashable) -> Callable:
        """The function for these settings; not compiled where somebody watches each launch."""
        return self._make(*settings) if is_watched() else self._compiled(*settings)
