"""Turns the executor's record of a fault into a message for a person."""

from pathlib import Path

from .report import Fault
from .request import FaultRecord, Party
from .tracing.instrumentation import ATOMICALLY, READS, WRITES
from .translation.building import MLX_INCLUDE, Compiled

_KINDS = [
    "",
    "race",
    "out of bounds",
    "uninitialised read",
    "divergent barrier",
    "divergent simdgroup operation",
    "deadlock",
    "address space",
    "misaligned access",
    "division by zero",
]
_SPACES = {1: "device buffer", 2: "constant buffer", 3: "threadgroup array"}
_WAITS = [
    "runs",
    "is in a simdgroup operation",
    "is at a simdgroup_barrier",
    "is at a threadgroup_barrier",
    "has returned",
]


class Places:
    """Source positions of a kernel by number, with the text of the line."""

    def __init__(self, compiled: Compiled):
        self._sites = compiled.program.sites
        self._own = compiled.source

    def describe(self, site: int) -> str:
        """`file:line: text` of a site; empty for one without a line."""
        file, line, _ = self._sites[site]
        if not line:
            return ""
        lines = self._lines(file)
        text = f": {lines[line - 1].strip()}" if line <= len(lines) else ""
        return f"{file.removeprefix(f'{MLX_INCLUDE}/')}:{line}{text}"

    def _lines(self, file: str) -> list[str]:
        if file == self._own.file:
            return self._own.text.split("\n")
        path = Path(file)
        return path.read_text().split("\n") if path.is_absolute() and path.is_file() else []


def fault(
    record: FaultRecord, kernel: str, places: Places, buffers: list[str], arrays: list[str]
) -> Fault:
    """`buffers`, `arrays`: names of the launch's buffers and of the threadgroup's arrays."""
    kind = _KINDS[record.kind]
    where = places.describe(record.party.site)
    regions = arrays if record.space == 3 else buffers
    region = regions[record.region] if record.region < len(regions) else "unknown"
    memory = f"byte {record.offset} of the {_SPACES.get(record.space, '')} `{region}`"
    other = record.other if record.has_other else None
    if record.space == 0 and kind == "out of bounds":
        what = f"index {record.offset} of the {record.size} elements of an array of its own: "
        what += f"{_thread(record.party)}{_at(where)}"
    elif kind == "race":
        what = f"{memory}: {_accessor(record.party, places)}, and nothing orders this after "
        what += _accessor(other, places, "an access in which ")
    elif kind in ("out of bounds", "uninitialised read", "address space"):
        memory += ", which may only be read," if kind == "address space" else ""
        what = f"{memory} ({record.size} bytes): {_accessor(record.party, places)}"
    elif kind == "misaligned access":
        what = f"{memory}, whose address is no multiple of {record.aligned}: "
        what += _accessor(record.party, places)
    elif kind == "division by zero":
        what = f"{_thread(record.party)} divides an integer by zero{_at(where)}"
    elif kind == "deadlock":
        what = f"{_thread(record.party)} waits for what no other thread does{_at(where)}"
    else:
        what = f"{_waiter(record.party, places)} while {_waiter(other, places)}"
    return Fault(
        kind,
        f"kernel {kernel}: {what}",
        where=where or memory,
        threadgroup=tuple(record.party.threadgroup),
        thread=record.party.thread,
        other_threadgroup=tuple(other.threadgroup) if other else None,
        other_thread=other.thread if other else None,
        other_where=places.describe(other.site) if other else "",
    )


def _thread(party: Party) -> str:
    return f"thread {party.thread} of threadgroup {tuple(party.threadgroup)}"


def _accessor(party: Party, places: Places, before: str = "") -> str:
    verbs = {READS: "reads", WRITES: "writes", READS | WRITES: "changes"}
    verb = verbs[party.access & (READS | WRITES)]
    how = " atomically" if party.access & ATOMICALLY else ""
    return f"{before}{_thread(party)} {verb}{how}{_at(places.describe(party.site))}"


def _waiter(party: Party, places: Places) -> str:
    where = "" if _WAITS[party.access] == "has returned" else _at(places.describe(party.site))
    return f"{_thread(party)} {_WAITS[party.access]}{where}"


def _at(where: str) -> str:
    return f" at {where}" if where else ""
