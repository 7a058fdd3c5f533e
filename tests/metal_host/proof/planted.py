"""Small right kernels of our own, and the same with a fault planted by replacing text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from .. import Fault, Library, Output, Report

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
#: orders of threads: in which a fault is found, in which nothing is to be found
SEEDS, ORDERS = range(4), range(20)
#: (what is replaced, by what): of text that occurs once
Change = tuple[str, str]


@dataclass(frozen=True)
class Example:
    """A kernel `example` of two buffers, x and y: its text, and what it makes of x."""

    text: str
    x: np.ndarray
    y: np.ndarray  # right results
    threads: int = 64
    threadgroups: int = 1
    initial: np.ndarray | None = None  # of y; None: not to be read before it is written
    more: Sequence[bytes | np.ndarray] = field(default=())  # further buffers

    def launch(
        self, *changes: Change, seed: int = 0, trace: bool = True, optimise: int = 2
    ) -> tuple[np.ndarray, Report]:
        """What the kernel leaves in y, with these changes to its text."""
        library = Library(self.changed(*changes), {"it": "example"}, trace=trace, optimise=optimise)
        y = np.zeros_like(self.y) if self.initial is None else self.initial.copy()
        more = [one.copy() if isinstance(one, np.ndarray) else one for one in self.more]
        buffers = [self.x.copy(), Output(y) if self.initial is None else y, *more]
        report = library.launch(
            "it", buffers, (self.threadgroups, 1, 1), (self.threads, 1, 1), seed
        )
        return y, report

    def changed(self, *changes: Change) -> str:
        """The text with these changes."""
        text = self.text
        for old, new in changes:
            assert text.count(old) == 1, f"{text.count(old)} times in the kernel: {old}"
            text = text.replace(old, new)
        return text

    def fault(self, *changes: Change, seed: int = 0, kind: str = "", at: str = "") -> Fault:
        """The fault that is found; `at`: text of a line that it names."""
        with pytest.raises(Fault) as caught:
            self.launch(*changes, seed=seed)
        found = caught.value
        assert found.kind in kind.split(" or "), found
        assert at in found.where + found.other_where, found
        assert found.where in str(found) or found.other_where in str(found)
        return found

    def is_right(self, seeds=ORDERS) -> None:
        """No fault and the right result, whatever the order."""
        for seed in seeds:
            assert np.allclose(self.launch(seed=seed)[0], self.y, rtol=1e-5, atol=1e-6), seed

    def results_unwatched(self, *changes: Change, seeds=ORDERS) -> list[bool]:
        """Whether the result is right, without the detector, for each seed."""
        runs = (self.launch(*changes, seed=seed, trace=False)[0] for seed in seeds)
        return [np.allclose(y, self.y, rtol=1e-5, atol=1e-6) for y in runs]


def kernel(body: str, more: str = "", header: str = "") -> str:
    """The text of a kernel from x to y: t, lane, simd: of the thread; g: its threadgroup."""
    return f"""{header}
[[kernel]] void example(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],{more}
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {{
{body}
}}
"""


def numbers(*shape: int) -> np.ndarray:
    """Normally distributed, always the same."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def barrier_removed(text: str, which: int) -> str:
    """Without the barrier number `which` of the text."""
    parts = text.split(BARRIER)
    assert which < len(parts) - 1
    return (
        BARRIER.join(parts[: which + 1]) + BARRIER.join(["", *parts[which + 1 :]])[len(BARRIER) :]
    )
