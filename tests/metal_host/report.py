"""What a launch has to tell: counts of its work, or the fault that ended it."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Report:
    """The work of one launch, or of several together; bytes where nothing else is said."""

    kernel: str = ""
    multiply_accumulates: int = 0
    special_functions: int = 0
    #: each barrier once for a threadgroup
    barriers: int = 0
    #: each operation once for a simdgroup
    simd_operations: int = 0
    #: by the name of the buffer
    device_read: Counter[str] = field(default_factory=Counter)
    device_written: Counter[str] = field(default_factory=Counter)
    #: bytes of outputs that nobody wrote
    unwritten: Counter[str] = field(default_factory=Counter)
    threadgroup_read: int = 0
    threadgroup_written: int = 0
    #: static memory of a threadgroup
    threadgroup_memory: int = 0
    #: the reports of the single launches, where there are several
    launches: list["Report"] = field(default_factory=list)
    #: whether accesses and multiply-accumulates were traced; if not, they count nothing
    traced: bool = True

    @classmethod
    def total(cls, launches: list["Report"]) -> "Report":
        """The sum of several; of `threadgroup_memory`, the largest."""
        whole = cls(kernel=", ".join(r.kernel for r in launches), launches=launches)
        for name in ("multiply_accumulates", "special_functions", "barriers", "simd_operations"):
            setattr(whole, name, sum(getattr(r, name) for r in launches))
        for name in ("threadgroup_read", "threadgroup_written"):
            setattr(whole, name, sum(getattr(r, name) for r in launches))
        for report in launches:
            whole.device_read.update(report.device_read)
            whole.device_written.update(report.device_written)
            whole.unwritten.update(report.unwritten)
            whole.threadgroup_memory = max(whole.threadgroup_memory, report.threadgroup_memory)
        whole.traced = all(r.traced for r in launches)
        return whole


class Fault(Exception):
    """A mistake that a kernel made, in one message."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        where: str = "",
        threadgroup: tuple[int, int, int] | None = None,
        thread: int | None = None,
        other_threadgroup: tuple[int, int, int] | None = None,
        other_thread: int | None = None,
        other_where: str = "",
    ):
        super().__init__(f"{kind}: {message}")
        #: race, out of bounds, uninitialised read, divergent barrier, divergent simdgroup
        #: operation, address space, misaligned access, division by zero, threadgroup memory
        #: or deadlock
        self.kind = kind
        #: file:line and the text of the line
        self.where = where
        self.threadgroup = threadgroup
        #: index in the threadgroup
        self.thread = thread
        self.other_threadgroup = other_threadgroup
        self.other_thread = other_thread
        self.other_where = other_where
