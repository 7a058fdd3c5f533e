"""Finds pointers and references without an address space: Metal refuses them, C++ does not.

On the host `thread` is an empty word, so the compiler cannot tell; this looks at the text.
"""

import re

from ..report import Fault

SPACES = {"device", "constant", "threadgroup", "thread"}
_TYPES = {"void", "bool", "char", "short", "int", "long", "half", "float", "bfloat", "size_t"}
_TYPES |= {"unsigned", "signed", "uchar", "ushort", "uint", "ulong", "ptrdiff_t", "vec", "array"}
_TYPES |= {"atomic", "simdgroup_matrix", "packed_vec", "bfloat16_t", "float16_t"}
_TYPES |= {"complex64_t", "complex_t"}
# Types by their form: `uint32_t`, `packed_half4`, `atomic_int`, `simdgroup_float8x8`, `half2x4`
_TYPE = re.compile(
    r"u?int(8|16|32|64)_t|(packed_)?(u?(char|short|int|long)|half|b?float|bool)[234]"
    r"|atomic_\w+|simdgroup_(float|half|bfloat)8x8|(half|float)[234]x[234]"
)
# What a kernel's text itself makes a type: `struct Pair {`, `using U =`, `typedef int V;`
_DEFINED = re.compile(r"\b(?:struct|class|enum|typename|using|union)\s+(?:class\s+)?(\w+)(?!\s*::)")
_TYPEDEF = re.compile(r"\btypedef\b[^;]*?(\w+)\s*;")
# `# 7 "kernel.metal" 2` of the preprocessor
_MARKER = re.compile(r'^# (\d+) "([^"]*)"')
_TOKEN = re.compile(r"\w+|::|&&|\|\||->|<<|>=|<=|==|!=|[^\s\w]")
#: what may stand between the parts of a declaration
_SPECIFIERS = {"const", "volatile", "static", "constexpr", "inline", "typename", "metal", "::"}


def check_address_spaces(text: str, foreign: str) -> None:
    """Raises a fault that names the first line with such a pointer or reference.

    `text`: preprocessed; what stems from files below the folder `foreign` is not looked at.
    """
    text, places = _own_lines(text, foreign)
    known = _TYPES | set(_DEFINED.findall(text)) | set(_TYPEDEF.findall(text))
    tokens = list(_TOKEN.finditer(text))
    words = [token[0] for token in tokens]
    for i, word in enumerate(words):
        if word in ("*", "&", "&&") and _is_declarator(words, i, known):
            number = text.count("\n", 0, tokens[i].start())
            file, line = places[number]
            where = f"{file}:{line}: {text.splitlines()[number].strip()}"
            what = "pointer" if word == "*" else "reference"
            message = f"a {what} without an address space at {where}"
            raise Fault("address space", message, where=where)


def _own_lines(text: str, foreign: str) -> tuple[str, list[tuple[str, int]]]:
    """The lines that are the kernel's own, and the file and line of each."""
    lines, places, file, line = [], [], "", 0
    for content in text.split("\n"):
        if match := _MARKER.match(content):
            file, line = match[2], int(match[1])
        elif content.lstrip().startswith("#"):
            line += 1
        else:
            if not file.startswith(foreign):
                lines.append(content)
                places.append((file, line))
            line += 1
    return "\n".join(lines), places


def _is_declarator(words: list[str], i: int, known: set[str]) -> bool:
    """Whether the `*` or `&` at `i` follows a type that has no address space."""
    end = i - 1
    if end >= 0 and words[end] == "(" and i + 2 < len(words) and words[i + 2] == ")":
        end -= 1  # `T (&tile)[8]`
    while end >= 0 and words[end] in _SPECIFIERS | SPACES | {"*"}:
        if words[end] in SPACES or words[end] == "*":
            return False  # told, or a pointer to a pointer: its inner one is looked at alone
        end -= 1
    name = _component_begin(words, end)
    begin = name
    while begin >= 2 and words[begin - 1] == "::":  # `A<B>::C`
        begin = _component_begin(words, begin - 2)
    dependent = begin > 0 and words[begin - 1] == "typename"
    if name < 0 or not (dependent or words[name] in known or _TYPE.fullmatch(words[name])):
        return False
    while begin > 0 and words[begin - 1] in _SPECIFIERS | known:
        begin -= 1
    return begin == 0 or words[begin - 1] not in SPACES


def _component_begin(words: list[str], end: int) -> int:
    """The index of the name in `name` or `name<arguments>` that ends at `end`; -1: none."""
    if end < 0 or words[end] != ">":
        return end
    depth = 0
    for j in range(end, -1, -1):
        depth += (words[j] == ">") - (words[j] == "<")
        if depth == 0:
            return j - 1
        if words[j] in ";{}":
            return -1
    return -1
