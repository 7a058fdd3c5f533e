"""Metal Shading Language turned into C++ that clang takes; lines stay where they are.

The address spaces are attributes that the headers define; what differs in grammar is changed here,
in text whose macros are expanded already.
"""

import re

# `[[kernel]]`, `constant bool has_mask [[function_constant(300)]];`
_ATTRIBUTE = re.compile(r"\[\[.*?\]\]", re.DOTALL)
_FUNCTION_CONSTANT = re.compile(
    r"\bconstant\s+([\w:]+)\s+(\w+)\s*\[\[\s*function_constant\s*\(\s*(\d+)\s*\)\s*\]\]\s*;"
)
# A parameter like `constant const int64_t strides[2]`: clang wants the pointer that it is.
_ARRAY_PARAMETER = re.compile(
    r"([(,]\s*(?:const\s+)?(?:device|constant|threadgroup)\b[^;(){}\[\]*&]*?)"
    r"\b(\w+)\s*\[[^\]]*\](?=\s*[,)])"
)
# `template [[host_name("f")]] [[kernel]] decltype(f<float>) f<float>;`
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
# `static_cast<bfloat>(x)`, `1.5bf`
_TO_BFLOAT = re.compile(r"\bstatic_cast\s*<\s*(bfloat(?:16_t)?)\s*>")
_BFLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][+-]?\d+)?)bf\b")
# `float sum() const device {`
_QUALIFIED_MEMBER = re.compile(r"\)\s*(?:const\s+)?(?:device|threadgroup|constant)\s*(?=[:{])")
# `threadgroup alignas(16) T tile[8];`
_THREADGROUP = re.compile(r"(?<![\w.])threadgroup\b([^;{}]*);")
_ALIGNAS = re.compile(r"\balignas\s*(\((?:[^()]|\([^()]*\))*\))")
# `# 7 "kernel.metal" 2`, then `[size]`, `<float, 4>` and `(n + 1)` inside of brackets
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
        # Else clang gives large arrays more than the alignment of an element.
        aligned = f"aligned(alignof({_declared_type(match[1])}))"
        explicit = [f"aligned{m[1]}" for m in _ALIGNAS.finditer(match[1])]
        attributes = ", ".join([aligned, *explicit])
        parts += [text[end : match.start()], f"static __attribute__(({attributes})) threadgroup"]
        parts.append(_ALIGNAS.sub(_blank, text[match.start(1) : match.end(1)]))
        end = match.end(1)
    return "".join(parts) + text[end:]


def _declares_variable(declaration: str) -> bool:
    """Whether the text between `threadgroup` and `;` declares arrays or values, not pointers."""
    declaration, previous = _ALIGNAS.sub(" ", declaration), None
    while previous != declaration:
        previous, declaration = declaration, _BRACKETED.sub(" ", declaration)
    return not re.search(r"[*&()=]", declaration)


def _declared_type(declaration: str) -> str:
    """The type in a declaration like `T name[8]`, `vec<T, 4> one, two`."""
    declaration, depth = _ALIGNAS.sub(" ", declaration), 0
    for end, c in enumerate(declaration):
        depth += (c in "<(") - (c in ">)")
        if depth == 0 and c in "[,":
            declaration = declaration[:end]
            break
    return re.sub(r"\s*\w+\s*$", "", declaration).strip()
