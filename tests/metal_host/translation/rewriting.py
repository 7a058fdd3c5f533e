"""Metal Shading Language turned into C++ that clang takes; lines stay where they are.

The address spaces are attributes that the headers define; what differs in grammar is changed here,
in text whose macros are expanded already.
"""

import re

_ATTRIBUTE = re.compile(r"\[\[.*?\]\]", re.DOTALL)
_FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+([\w:]+)\s+(\w+)\s*\[\[\s*function_constant\s*\(\s*(\d+)\s*\)\s*\]\]\s*;"
)
# A parameter like `constant const int64_t strides[2]`: clang wants the pointer that it is.
_ARRAY_PARAMETER = re.compile(
    r"([(,]\s*(?:const\s+)?(?:device|constant|threadgroup)\b[^;(){}\[\]*&]*?)"
    r"\b(\w+)\s*\[[^\]]*\](?=\s*[,)])"
)
_INSTANTIATION = re.compile(r"\btemplate\s*\[\[\s*host_name\b[^;]*;")
# `float4(a, b.xy, 1)`: clang's vectors have no such constructors in C++.
_VECTOR = (
    r"\b((?:metal::)?vec\s*<(?:[^<>;(){}]|<[^<>;(){}]*>)*>"
    r"|(?:metal::)?(?:bool|u?char|u?short|u?int|u?long|half|bfloat|float)[234])"
)
_CONSTRUCTION = re.compile(rf"(?<!operator ){_VECTOR}(\s*)\((?!\s*[&*])")
# `float2 x(a, b);` as well; two words in a row are a parameter, and declare a function.
_VARIABLE = re.compile(rf"{_VECTOR}(\s+\w+)\s*\((?![^;{{}}]*\w\s+\w)([^;{{}}]+)\)\s*;")
# clang has no conversion between its 16-bit types, nor a suffix for bfloat.
_TO_BFLOAT = re.compile(r"\bstatic_cast\s*<\s*(bfloat(?:16_t)?)\s*>")
_BFLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?)bf\b")
_QUALIFIED_MEMBER = re.compile(r"\)\s*(?:const\s+)?(?:device|threadgroup|constant)\s*(?=[:{])")
_THREADGROUP = re.compile(r"(?<![\w.])threadgroup\b([^;{}]*);")
_MARKER = re.compile(r"^[ \t]*#[^\n]*$", re.MULTILINE)
_BRACKETED = re.compile(r"\[[^\[\]]*\]|<[^<>]*>|\([^()]*\)(?=[^\[\]]*\])")


def rewrite(text: str, constants: dict[int, object]) -> str:
    """The C++ of a preprocessed Metal source, with values for its function constants."""
    text = _bind_constants(text, constants)
    text = _INSTANTIATION.sub(_blank, text)
    text = _ATTRIBUTE.sub(_blank, text)
    text = _drop_qualified_members(text)
    text = _ARRAY_PARAMETER.sub(r"\1* \2", text)
    text = _VARIABLE.sub(r"\1\2 = \1(\3);", text)
    text = _CONSTRUCTION.sub(r"metal::construct<\1>\2(", text)
    text = _TO_BFLOAT.sub(r"metal::convert<\1>", text)
    text = _BFLOAT_LITERAL.sub(r"bfloat(\1f)", text)
    return _make_threadgroup_arrays_static(text)


def _blank(match: re.Match) -> str:
    """Spaces in place of a match, so that lines and columns stay."""
    return re.sub(r"[^\n]", " ", match[0])


def _drop_qualified_members(text: str) -> str:
    """Member functions for objects in a named space; clang has them for the default one only."""
    while match := _QUALIFIED_MEMBER.search(text):
        start = max(text.rfind(end, 0, match.start()) for end in ";{}") + 1
        stop, depth = text.index("{", match.end()), 0
        while True:
            depth += {"{": 1, "}": -1}.get(text[stop], 0)
            stop += 1
            if depth == 0:
                break
        text = text[:start] + "\n" * text.count("\n", start, stop) + text[stop:]
    return text


def _bind_constants(text: str, constants: dict[int, object]) -> str:
    declared = {int(m[3]): m[2] for m in _FUNCTION_CONSTANT.finditer(text)}
    if missing := sorted(declared.keys() - constants.keys()):
        names = ", ".join(f"{number} ({declared[number]})" for number in missing)
        raise ValueError(f"function constants without a value: {names}")

    def bind(match: re.Match) -> str:
        value = constants[int(match[3])]
        literal = str(value).lower() if isinstance(value, bool) else repr(value)
        return f"static constexpr constant {match[1]} {match[2]} = {literal};"

    return _FUNCTION_CONSTANT.sub(bind, text)


def _make_threadgroup_arrays_static(text: str) -> str:
    """Variables of the threadgroup are declared in functions, and are not on the stack."""
    scan = _MARKER.sub(_blank, text)
    parts, end = [], 0
    for match in _THREADGROUP.finditer(scan):
        before = scan[: match.start()].rstrip()
        if before and before[-1] not in ";{}" or not _declares_variable(match[1]):
            continue
        parts += [text[end : match.start()], "static "]
        end = match.start()
    return "".join(parts) + text[end:]


def _declares_variable(declaration: str) -> bool:
    """Whether the text between `threadgroup` and `;` declares arrays or values, not pointers."""
    previous = None
    while previous != declaration:
        previous, declaration = declaration, _BRACKETED.sub(" ", declaration)
    return not re.search(r"[*&()=]", declaration)
