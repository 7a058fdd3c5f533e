"""What stands beside a launch: another launcher, a record of what ran, poisoned outputs.

All three hold for the whole process while their ``with`` block runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_launchers: list[Callable] = []
_records: list[list["Ran"]] = []
_poison: list[float] = []


class Ran(NamedTuple):
    """One choice: ``kernel`` ran on ``backend``, or plain MLX (None) for the ``reason``."""

    kernel: str
    backend: str | None
    reason: str = ""


@contextmanager
def launched_by(launcher: Callable) -> Iterator[None]:
    """Lets something else than a GPU run the kernels, which are chosen as on a Mac.

    Args:
        launcher: ``launcher(kernel, **call)`` with the ``mx.fast.metal_kernel`` object and what
            it would be called with, and ``overwrites``, names of inputs, where the kernel writes
            some; returns the list of outputs.
    """
    _launchers.append(launcher)
    try:
        yield
    finally:
        _launchers.remove(launcher)


@contextmanager
def record() -> Iterator[list[Ran]]:
    """Gives a list that grows by one :class:`Ran` for each launch and each choice of plain MLX.

    It grows when a call is built: a function of ``mx.compile`` adds to it when it is traced.
    """
    ran: list[Ran] = []
    _records.append(ran)
    try:
        yield ran
    finally:
        # by identity: two empty lists are equal
        _records[:] = [one for one in _records if one is not ran]


@contextmanager
def outputs_start_as(value: float) -> Iterator[None]:
    """Fills the outputs of kernels before they run; NaN shows what a kernel leaves out."""
    _poison.append(value)
    try:
        yield
    finally:
        _poison.pop()


def is_watched() -> bool:
    """Whether anything of this module holds now."""
    return bool(_launchers or _records or _poison)


def current_launcher() -> Callable | None:
    """The launcher of :func:`launched_by`, if there is one."""
    return _launchers[-1] if _launchers else None


def first_value() -> float | None:
    """The value of :func:`outputs_start_as`, if there is one."""
    return _poison[-1] if _poison else None


def note(name: Callable[[], str], backend: str | None, reason: str = "") -> None:
    """Adds to every record; ``name()`` is asked only where there is one."""
    if _records:
        entry = Ran(name(), backend, reason)
        for ran in _records:
            ran.append(entry)
