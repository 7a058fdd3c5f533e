"""Functions of arrays whose graph MLX keeps, for calls that take longer to build than to run."""

import threading
from collections.abc import Callable, Hashable, Sequence
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
    ``mx.compile`` holds on to it, so that a later call has only the new arrays to put in. It holds
    the launches alone: what derivatives need around them would take time at each call.

    Each thread has graphs of its own: MLX keeps them by thread and by a function's address,
    which, once freed by another thread, could be found again by a function that is not its own.

    Args:
        make: ``make(*settings)`` gives two functions of the same arrays: one of launches, and the
            same with derivatives, which is taken where MLX traces a call for those.
    """

    def __init__(self, make: Callable[..., tuple[Callable, Callable]]):
        self._make = make
        self._arrays: Sequence[mx.array] = ()
        self._kept = lru_cache(maxsize=KEPT)(self._keep)

    def __call__(self, *settings: Hashable) -> Callable:
        """The function for these settings; not compiled where somebody watches each launch."""
        return self._make(*settings)[1] if is_watched() else self._kept(*settings)

    def _keep(self, *settings: Hashable) -> Callable:
        launches, function = self._make(*settings)

        def trace(*arrays):
            return (function if are_traced(self._arrays) else launches)(*arrays)

        graph = mx.compile(trace)

        def call(*arrays):
            self._arrays = arrays
            try:
                return graph(*arrays)
            finally:
                self._arrays = ()

        return call


def are_traced(arrays: Sequence[mx.array]) -> bool:
    """Whether some are stand-ins by which MLX traces a function of the caller's.

    MLX tells nobody, but runs a compiled function again for such arrays whatever it has kept.
    """
    runs = []

    def run(*arrays):
        runs.append(len(arrays))
        return list(arrays)

    graph = mx.compile(run)
    # the first graph of a process is traced twice
    for _ in range(3):
        graph(*arrays)
    return len(runs) == 3
