"""The variables of a module that threads share: arrays of the threadgroup, and constants."""

import re

from .intermediate import leading_type, size_of

#: bytes kept free before and after an array of the threadgroup
REDZONE = 4096
#: in bytes, also of arrays of half: MLX's steel_attention keeps floats in one
LEAST_ALIGNMENT = 4
# `@_ZZ1kvE4tile = internal addrspace(3) global [64 x float] undef, align 4, !dbg !7`
_GLOBAL = re.compile(r"^(@[\w.$]+) = (.*?)\baddrspace\(([23])\) (?:global|constant) (.*)$")


class Variables:
    """Notes the variables that a module's lines define, and makes room around arrays."""

    def __init__(self):
        self.arrays: dict[str, str] = {}  # symbol -> type
        self.constants: dict[str, str] = {}

    def rewrite(self, line: str) -> list[str]:
        """The lines to stand for one outside of functions; notes the variable that it defines."""
        match = _GLOBAL.match(line) if line.startswith("@") else None
        if not match or " external " in f" {match[2]} ":
            return [line]
        symbol, type_ = match[1], leading_type(match[4])
        if match[3] == "2":
            self.constants[symbol] = type_
            return [line]
        self.arrays[symbol] = type_
        # An array with free space around it, under the array's name. It lies as it was declared
        # to, and no better: nothing promises more than the alignment of an element.
        aligned = max(LEAST_ALIGNMENT, int(re.search(r", align (\d+)", match[4])[1]))
        offset = REDZONE + aligned
        block = f"<{{ [{offset} x i8], {type_}, [{REDZONE} x i8] }}>"
        return [
            f"{symbol}.block = internal addrspace(3) global {block} zeroinitializer, "
            f"align {max(128, 2 * aligned)}",
            f"{symbol} = internal alias {type_}, ptr addrspace(3) getelementptr "
            f"(i8, ptr addrspace(3) {symbol}.block, i64 {offset})",
        ]

    def tables(self) -> list[str]:
        """For the executor, which finds addresses and sizes there."""
        return [_table("arrays", 3, self.arrays), _table("constants", 2, self.constants)]


def _table(name: str, space: int, types: dict[str, str]) -> str:
    pointer = f"ptr addrspace({space})"
    entry = f"{{ {pointer}, i64 }}"
    entries = [f"{entry} {{ {pointer} {s}, i64 {size_of(t)} }}" for s, t in types.items()]
    entries = entries or [f"{entry} zeroinitializer"]
    return f"@metal_host_{name} = constant [{len(entries)} x {entry}] [{', '.join(entries)}]"
