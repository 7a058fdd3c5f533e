"""The functions of a module of LLVM IR: whose they are, what they call, what they touch."""

import re
from dataclasses import dataclass, field

from .intermediate import DebugInfo, split_operands

_REFERENCE = re.compile(r"@([\w.$]+)")
_FUNCTION_DEBUG = re.compile(r"!dbg (!\d+)")


@dataclass
class Function:
    """A function of the module, and what is found out about it."""

    name: str
    first_line: str
    #: names of its parameters, in order
    parameters: list[str]
    in_headers: bool
    #: in the header of atomic operations
    atomic: bool
    lines: list[str] = field(default_factory=list)
    refers_to: set[str] = field(default_factory=set)
    #: accesses shared memory, or meets other threads
    shares: bool = False
    #: pointers without an address space that may point to shared memory (generic_pointers.py)
    generic: set[str] = field(default_factory=set)


def read_module(text: str, debug: DebugInfo, headers: str) -> list[str | Function]:
    """The module's lines, with a Function in place of those of each function.

    `headers`: the folder whose functions are not the kernel's own.
    """
    parts: list[str | Function] = []
    current = None
    for line in text.split("\n"):
        if line.startswith("define "):
            current = _begin(line, debug, headers)
            parts.append(current)
        elif current is None:
            parts.append(line)
        elif line == "}":
            current = None
        else:
            current.lines.append(line)
            current.refers_to.update(_REFERENCE.findall(line))
            current.shares |= "ptr addrspace(" in line or "@_ZN10metal_host" in line
    return parts


def _begin(line: str, debug: DebugInfo, headers: str) -> Function:
    name, parameters = _definition(line)
    node = _FUNCTION_DEBUG.search(line)
    file = debug.file(node[1]) if node else headers
    return Function(
        name, line, parameters, file.startswith(headers), file.endswith("/metal_atomic")
    )


def _definition(line: str) -> tuple[str, list[str]]:
    start = re.search(r"@([\w.$]+)\(", line)
    depth, end = 1, start.end()
    while depth:
        depth += {"(": 1, ")": -1}.get(line[end], 0)
        end += 1
    parameters = split_operands(line[start.end() : end - 1])
    return start[1], [parameter.split(" ")[-1] for parameter in parameters if parameter]


def reachable(functions: dict[str, Function], start: str) -> set[str]:
    """The symbols that a function refers to, itself or by others."""
    found, pending = set(), [start]
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            if name in functions:
                pending += functions[name].refers_to
    return found


def sharing_headers(functions: dict[str, Function]) -> set[str]:
    """Functions of the headers that share, themselves or by others: callers' positions matter."""
    sharing = {name for name, function in functions.items() if function.shares}
    while True:
        more = {
            name
            for name, function in functions.items()
            if name not in sharing and function.refers_to & sharing
        }
        if not more:
            return {name for name in sharing if functions[name].in_headers}
        sharing |= more
