"""Reading LLVM IR as text: types, operands, debug information."""

import re

# `!12 = distinct !DISubprogram(name: "kernel", scope: !1, file: !1, line: 7)`
_METADATA = re.compile(r"^(!\d+) = (?:distinct )?!(DI\w+)\((.*)\)$", re.MULTILINE)
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|(!?\w+))')
_OPEN, _CLOSE = "([{<", ")]}>"
_SIMPLE_TYPES = {"i1": 1, "i8": 1, "i16": 2, "half": 2, "bfloat": 2, "i32": 4, "float": 4}
_SIMPLE_TYPES |= {"i64": 8, "double": 8, "ptr": 8}


def split_operands(text: str) -> list[str]:
    """Parts at the commas that are outside all brackets and quotes."""
    parts, depth, begin, quoted = [], 0, 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[begin:i].strip())
            begin = i + 1
    return [*parts, text[begin:].strip()]


def leading_type(text: str) -> str:
    """The type that a text like `[4 x float] %x` begins with."""
    if text.startswith("ptr addrspace("):
        return text[: text.index(")") + 1]
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in _OPEN:
            depth += 1
        elif c in _CLOSE:
            depth -= 1
        elif c == " " and depth == 0:
            return text[:i]
    return text


def size_of(type_: str) -> str:
    """The bytes of a type, as a constant of the intermediate code."""
    if type_ in _SIMPLE_TYPES:
        return str(_SIMPLE_TYPES[type_])
    return f"ptrtoint (ptr getelementptr ({type_}, ptr null, i32 1) to i64)"


def natural_alignment(type_: str) -> int:
    """That of a number or vector, which is its size; 1 for other types."""
    vector = re.match(r"<(\d+) x (\w+)>$", type_)
    if vector and vector[2] != "i1":
        return int(vector[1]) * _SIMPLE_TYPES.get(vector[2], 1)
    return _SIMPLE_TYPES.get(type_, 1)


def variable_name(symbol: str) -> str:
    """The name in the source of a mangled variable: `tile` of `@_ZZ6kernelvE4tile`."""
    for match in re.finditer(r"(?=(\d+))", symbol):
        name = symbol[match.end(1) :]
        name = re.sub(r"(?:_\d+|\.\d+)?$", "", name) if len(name) > int(match[1]) else name
        if len(name) == int(match[1]):
            return name
    return symbol.lstrip("@")


class DebugInfo:
    """Which file and line an instruction or function comes from."""

    def __init__(self, text: str):
        self._nodes = {}
        for match in _METADATA.finditer(text):
            values = {name: a or b for name, a, b in _FIELD.findall(match[3])}
            self._nodes[match[1]] = (match[2], values)

    def file(self, node: str) -> str:
        """The file of a function's or scope's node."""
        kind, values = self._nodes.get(node, ("", {}))
        if kind == "DIFile":
            # May be relative to a folder that clang chose; names from #line have no folder.
            name = values.get("filename", "")
            relative = "/" in name and not name.startswith("/")
            return f"{values['directory']}/{name}" if relative else name
        if "file" in values:
            return self.file(values["file"])
        return self.file(values["scope"]) if "scope" in values else ""

    def location(self, node: str) -> tuple[str, int, int]:
        """File, line and column of an instruction's node."""
        _, values = self._nodes.get(node, ("", {}))
        file = self.file(values["scope"]) if "scope" in values else ""
        return file, int(values.get("line", 0)), int(values.get("column", 0))
