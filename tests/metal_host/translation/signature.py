"""The parameters of a kernel, and the function that calls it with a launch's arguments."""

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path

_RUNTIME = Path(__file__).parents[1] / "runtime"
_ATTRIBUTES = re.compile(r"\[\[(.*?)\]\]", re.DOTALL)
_BUFFER = re.compile(r"\bbuffer\s*\(\s*(\d+)\s*\)")
_NAME = re.compile(r"(\w+)\s*(?:\[[^\]]*\])?\s*$")
_UNNUMBERED = -1  # a buffer that takes the next free index, as in Metal
_POSITIONS = {
    "thread_position_in_grid",
    "thread_position_in_threadgroup",
    "threadgroup_position_in_grid",
    "threadgroups_per_grid",
    "threads_per_grid",
    "threads_per_threadgroup",
    "dispatch_threads_per_threadgroup",
    "grid_size",
    "grid_origin",
    "thread_index_in_threadgroup",
    "thread_index_in_simdgroup",
    "thread_index_in_quadgroup",
    "simdgroup_index_in_threadgroup",
    "quadgroup_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "quadgroups_per_threadgroup",
    "dispatch_simdgroups_per_threadgroup",
    "dispatch_quadgroups_per_threadgroup",
    "threads_per_simdgroup",
    "thread_execution_width",
}


@dataclass(frozen=True)
class Parameter:
    """A buffer (`buffer`: its index) or a value of the thread's position (`position`: its name)."""

    name: str
    buffer: int | None = None
    position: str | None = None
    constant: bool = False  # in the constant address space
    read_only: bool = False


def kernel_parameters(source: str, function: str) -> list[Parameter]:
    """The parameters of the kernel `function` in the preprocessed Metal text `source`."""
    start = re.search(rf"\bvoid\s+{re.escape(function)}\s*\(", source)
    if not start:
        raise ValueError(f"there is no kernel `{function}` in the source")
    parameters = [_parameter(text) for text in _split(source, start.end())]
    taken = {p.buffer for p in parameters}
    free = (i for i in itertools.count() if i not in taken)
    return [replace(p, buffer=next(free)) if p.buffer == _UNNUMBERED else p for p in parameters]


def _split(source: str, start: int) -> list[str]:
    """The parameters from `start` up to the closing parenthesis."""
    depth, parts, begin = 0, [], start
    for i in range(start, len(source)):
        c = source[i]
        if c in "([<{":
            depth += 1
        elif c in ")]>}" and depth:
            depth -= 1
        elif c == ")" or (c == "," and depth == 0):
            parts.append(source[begin:i].strip())
            begin = i + 1
            if c == ")":
                break
    return [part for part in parts if part]


def _parameter(text: str) -> Parameter:
    attributes = " ".join(_ATTRIBUTES.findall(text))
    declaration = _ATTRIBUTES.sub("", text).strip()
    name = _NAME.search(declaration)[1]
    match = _BUFFER.search(attributes)
    if match or (not attributes and re.search(r"[*&]", declaration)):
        constant = re.search(r"\bconstant\b", declaration) is not None
        read_only = re.search(r"\bconst(ant)?\b", declaration) is not None
        buffer = int(match[1]) if match else _UNNUMBERED
        return Parameter(name, buffer, constant=constant, read_only=read_only)
    for attribute in re.findall(r"\w+", attributes):
        if attribute in _POSITIONS:
            return Parameter(name, position=attribute)
    raise ValueError(f"cannot tell what the kernel's parameter `{text}` is")


def entry(expression: str, parameters: list[Parameter]) -> str:
    """C++ that calls the kernel `expression`, for example `attention<float, 32>`."""
    arguments = [
        f"buffers[{p.buffer}]" if p.position is None else f"at.{p.position}" for p in parameters
    ]
    return (
        f'\n#line 1 "{_RUNTIME}/entry"\n#include "{_RUNTIME}/invoke.h"\n'
        'extern "C" METAL_HOST_ENTRY __attribute__((visibility("default"))) '
        "void metal_host_function(void* const* buffers, const metal_host::Position& at) {\n"
        f"  metal_host::invoke({', '.join([f'&{expression}', *arguments])});\n}}\n"
    )
