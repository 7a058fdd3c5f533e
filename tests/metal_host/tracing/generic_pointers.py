"""Finds pointers without an address space that may point to shared memory all the same.

Structs in device or threadgroup memory are copied, and their member functions called, through
such pointers (`this`). Followed from the casts that make them, through variables, calls and
returns; not through members of structs.
"""

import re

from .functions import Function
from .intermediate import split_operands

# `%4 = load ptr, ptr %3`, `addrspacecast ptr addrspace(3) %2 to ptr`, `call float @_Z3sumP(ptr %4)`
_RESULT = re.compile(r"^  (%[\w.$]+) = (.*)$")
_CAST = re.compile(r"addrspacecast \(?ptr addrspace\(\d\)")
_CALL = re.compile(r"\bcall [^@]*@([\w.$]+)\((.*)\)")
_NAME = re.compile(r"%[\w.$]+")
_COPIES = ("getelementptr", "phi", "select", "bitcast", "freeze")


def mark_generic_pointers(functions: dict[str, Function]) -> None:
    """Fills in `generic` of each function."""
    returning: set[str] = set()  # functions that return such pointers
    changed = True
    while changed:
        before = _size(functions, returning)
        for function in functions.values():
            _follow(function, functions, returning)
        changed = _size(functions, returning) != before


def _size(functions: dict[str, Function], returning: set[str]) -> int:
    return len(returning) + sum(len(function.generic) for function in functions.values())


def _follow(function: Function, functions: dict[str, Function], returning: set[str]) -> None:
    generic = function.generic
    for line in function.lines:
        if call := _CALL.search(line):
            _pass_arguments(call, generic, functions)
        if match := _RESULT.match(line):
            if call and call[1] in returning or _is_made(match[2], generic):
                generic.add(match[1])
        elif line.startswith("  store ptr "):
            value, slot = split_operands(line.strip())[:2]
            if is_generic(value, generic):
                generic.add(_NAME.findall(slot)[-1])
        elif line.startswith("  ret ptr ") and is_generic(line, generic):
            returning.add(function.name)


def _is_made(operation: str, generic: set[str]) -> bool:
    """Whether an operation gives such a pointer."""
    if operation.startswith("addrspacecast"):
        return re.search(r" to ptr(,|$)", operation) is not None
    if operation.startswith(("load ptr,", *_COPIES)):
        return is_generic(operation, generic)
    return False


def _pass_arguments(call: re.Match, generic: set[str], functions: dict[str, Function]) -> None:
    callee = functions.get(call[1])
    if callee is None:
        return
    arguments = split_operands(call[2])
    for argument, parameter in zip(arguments, callee.parameters, strict=False):
        if argument.startswith("ptr ") and is_generic(argument, generic):
            callee.generic.add(parameter)


def is_generic(operand: str, generic: set[str]) -> bool:
    """Whether an operand like `ptr %5` may point to shared memory."""
    if operand.startswith("ptr addrspace("):
        return False
    return _CAST.search(operand) is not None or bool(generic & set(_NAME.findall(operand)))
