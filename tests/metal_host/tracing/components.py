"""Accesses to one component of a vector in shared memory.

clang loads the whole vector for `v.x`, and for `v.x = 1` stores it whole again. The source touches
one component, and other threads may be at the others.
"""

import re
from dataclasses import dataclass

# `%3 = load <4 x float>, ptr addrspace(3) %2, align 16`, then `%4 = extractelement <4 x float> %3,
# i32 1` or `%4 = insertelement <4 x float> %3, float %1, i32 1` and a store of %4
_LOAD = re.compile(
    r"^  (%\S+) = load (<\d+ x (\w+)>), (ptr addrspace\([13]\) .*), align \d+(?:, !.*)?$"
)
_EXTRACT = re.compile(r"^  %\S+ = extractelement <.*?> (%\S+), (i\d+ [^,]+)(?:, !.*)?$")
_INSERT = re.compile(r"^  (%\S+) = insertelement <.*?> (%\S+), [^,]+, (i\d+ [^,]+)(?:, !.*)?$")


@dataclass(frozen=True)
class Component:
    """An access to one component of a vector."""

    vector: str  # type
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
        return Component(vector, element, pointer, extract[2], False)
    if insert and insert[2] == value:
        if lines[2].startswith(f"  store {vector} {insert[1]}, {pointer}, align"):
            return Component(vector, element, pointer, insert[3], True)
    return None
