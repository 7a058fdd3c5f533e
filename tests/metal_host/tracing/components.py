"""Accesses to one component of a vector in shared memory.

clang loads the whole vector for `v.x`, and for `v.x = 1` stores it whole again. The source touches
one component, and other threads may be at the others.
"""

import re
from dataclasses import dataclass

_LOAD = re.compile(
    r"^  (%\S+) = load (<\d+ x (\w+)>), (ptr addrspace\([13]\) .*), align \d+(?:, !.*)?$"
)
_EXTRACT = re.compile(r"^  %\S+ = extractelement <.*?> (%\S+), (i\d+ [^,]+)(?:, !.*)?$")
_INSERT = re.compile(r"^  (%\S+) = insertelement <.*?> (%\S+), [^,]+, (i\d+ [^,]+)(?:, !.*)?$")


@dataclass(frozen=True)
class Component:
    element: str  # type
    pointer: str  # to the vector
    index: str
    written: bool


def component(lines: list[str]) -> Component | None:
    """What the first of three lines loads one component of, if that is all that it is for."""
    load = _LOAD.match(lines[0])
    if not load or len(lines) < 3:
        return None
    value, vector, element, pointer = load.groups()
    extract, insert = _EXTRACT.match(lines[1]), _INSERT.match(lines[1])
    if extract and extract[1] == value:
        return Component(element, pointer, extract[2], False)
    if insert and insert[2] == value:
        if lines[2].startswith(f"  store {vector} {insert[1]}, {pointer}, align"):
            return Component(element, pointer, insert[3], True)
    return None
