"""Rewrites clang's intermediate code (LLVM IR, as text) so that a kernel's accesses are checked.

This happens before any optimisation: each access that the source makes is seen exactly once, and
the address space stands in the pointer's type, so a thread's own memory costs nothing.
"""

import re
from dataclasses import dataclass, field

from .components import Component, component
from .functions import Function, reachable, read_module, sharing_headers
from .generic_pointers import is_generic, mark_generic_pointers
from .intermediate import (
    DebugInfo,
    leading_type,
    natural_alignment,
    size_of,
    split_operands,
    variable_name,
)
from .variables import Variables

READS, WRITES, ATOMICALLY = 1, 2, 4  # AccessKind of runtime/request.h
#: an access's alignment is this many bits above those of its kind
ALIGNMENT = 8
ENTRY = "metal_host_function"

# `%3 = load float, ptr addrspace(1) %2, align 4, !dbg !9`, `store float %3, ptr %4, align 4`,
# `%5 = atomicrmw add ptr %4, i32 1 monotonic`, `call void @llvm.memcpy.p0.p1.i64(...)`
_LOAD = re.compile(r"^%\S+ = load (atomic )?(?:volatile )?(.*)$")
_STORE = re.compile(r"^store (atomic )?(?:volatile )?(.*)$")
_EXCHANGE = re.compile(r"^%\S+ = (atomicrmw|cmpxchg) (?:weak )?(?:volatile )?(?:\w+ )??(ptr .*)$")
_BLOCK = re.compile(r"^(?:tail )?call void @llvm\.(memcpy|memmove|memset)\.[^(]*\((.*)\)")
# `%7 = call float @llvm.fmuladd.f32(float %4, float %5, float %6)`, `%9 = sdiv i32 %7, %8`
_FUSED = re.compile(r"^(%\S+) = (?:tail )?call .*? @llvm\.fmuladd\.[^(]*\((.*)\)")
_DIVISION = re.compile(r"^%\S+ = [su](?:div|rem) (?:exact )?(.*)$")
# `call void @_Z4helperv()`, `addrspacecast ptr addrspace(1) %2 to ptr`
_CALLEE = re.compile(r"\bcall [^@]*@([\w.$]+)\(")
_CAST = re.compile(r"\baddrspacecast \(?ptr")
# `ptr addrspace(3) noundef align 16 %4`
_POINTER = re.compile(
    r"^ptr(?: addrspace\((\d)\))? "
    r"(?:noundef |nonnull |noalias |align \d+ |captures\([^)]*\) |dereferenceable\(\d+\) )*(.+)$"
)
_ALIGNED = re.compile(r"\balign (\d+)\b")
# `ptr addrspace(1) noundef nonnull align 16 dereferenceable(16) %0`: a reference
_ALIGNED_REFERENCE = re.compile(r"\balign \d+ (?=dereferenceable)")
# What ends an instruction: `syncscope("agent") monotonic`, `, !tbaa !4, !dbg !9`
_ORDERING = re.compile(r" (?:syncscope\(.*?\) )?(?:monotonic|acquire|release|acq_rel|seq_cst)$")
_DEBUG = re.compile(r", !dbg (!\d+)")
_ATTACHMENTS = re.compile(r"(?:, !\w+ !\d+)+$")
# Loops that Metal is told to unroll cost the compiler seconds, and gain nothing here.
_LOOP = re.compile(r", !llvm\.loop !\d+")
# clang forgets to truncate a component that is assigned to a vector of bool.
_BOOL_COMPONENT = re.compile(r"^(  %\S+ = insertelement <8 x i1> %\S+, )i8 ([^,]+)(, .*)$")
_DECLARATIONS = """
@metal_host_site = external global i32
declare void @metal_host_access_0(ptr, i64, i32, i32)
declare void @metal_host_access_1(ptr addrspace(1), i64, i32, i32)
declare void @metal_host_access_2(ptr addrspace(2), i64, i32, i32)
declare void @metal_host_access_3(ptr addrspace(3), i64, i32, i32)
declare void @metal_host_index(i64, i64, i32)
declare void @metal_host_divisor(i64, i32)
declare void @metal_host_multiply_accumulate(i64)
"""


@dataclass
class Program:
    """The instrumented text, and what its numbers mean."""

    text: str = ""
    #: of each site: file, line, column
    sites: list[tuple[str, int, int]] = field(default_factory=lambda: [("", 0, 0)])
    #: names of the threadgroup's arrays, in the order of the table
    arrays: list[str] = field(default_factory=list)
    #: indices of those that the kernel uses
    used: list[int] = field(default_factory=list)
    #: how many constants the program has
    constants: int = 0
    #: sites in the kernel's own text that cast between address spaces
    casts: list[int] = field(default_factory=list)


def instrument(text: str, headers: str, traced: bool) -> Program:
    """`headers`: the folder of the stand-in for the system's headers: no part of the kernel."""
    debug = DebugInfo(text)
    parts = read_module(text, debug, headers)
    functions = {part.name: part for part in parts if isinstance(part, Function)}
    mark_generic_pointers(functions)
    program, variables = Program(), Variables()
    rewriter = _Rewriter(program, debug, sharing_headers(functions), traced)
    output = []
    for part in parts:
        if isinstance(part, Function):
            output += [_ALIGNED_REFERENCE.sub("", part.first_line), *rewriter.body(part), "}"]
        else:
            output += variables.rewrite(part)
    program.text = "\n".join([*output, _DECLARATIONS, *variables.tables()])
    program.arrays = [variable_name(symbol) for symbol in variables.arrays]
    program.constants = len(variables.constants)
    needed = reachable(functions, ENTRY)
    program.used = [i for i, symbol in enumerate(variables.arrays) if symbol[1:] in needed]
    return program


class _Rewriter:
    """Rewrites instructions, one function after the other."""

    def __init__(self, program: Program, debug: DebugInfo, sharing: set[str], traced: bool):
        self.program = program
        self.debug = debug
        self.sharing = sharing
        self.traced = traced
        self.site_numbers: dict[tuple[str, int, int], int] = {}
        self.temporaries = 0
        self.function: Function

    def body(self, function: Function) -> list[str]:
        self.function = function
        lines = [_LOOP.sub("", line) for line in function.lines]
        output, done = [], -1
        for i, line in enumerate(lines):
            found = component(lines[i : i + 3]) if " = load <" in line else None
            if found:
                output += self._component(found, line)
                done = i + 2 * found.written  # the store that belongs to it
            if found or i == done:
                output.append(_anywhere(line))
            elif not line.startswith("  "):
                output.append(line)
            else:
                output += self._instruction(line)
        return output

    def _instruction(self, line: str) -> list[str]:
        if "getelementptr" in line:
            # Out of bounds is to be reported, not to be undefined.
            line = re.sub(r"getelementptr (?:inbounds |nuw |nusw )+", "getelementptr ", line)
        body = _ATTACHMENTS.sub("", line.strip())
        if "addrspacecast" in body and _CAST.search(body) and not self.function.in_headers:
            self.program.casts.append(self._site(line))
        if "= insertelement <8 x i1>" in body and (match := _BOOL_COMPONENT.match(line)):
            bit = self._temporary()
            return [f"  {bit} = trunc i8 {match[2]} to i1", f"{match[1]}i1 {bit}{match[3]}"]
        if "= getelementptr [" in body:
            return [*self._index(body, line), line]
        if "fmuladd" in body and (match := _FUSED.match(body)):
            return self._fused(line, match)
        if "call " in body:
            own = _ALIGNED_REFERENCE.sub("", line)
            own = _anywhere(own) if _BLOCK.match(body) else own
            return [*self._note_call(body, line), *self._block(body, line), own]
        if match := _DIVISION.match(body):
            return [*self._divisor(match[1], line), line]
        if "addrspace(" in body or self.function.generic:
            return [*self._access(body, line), _anywhere(line)]
        return [line]

    # Accesses

    def _index(self, body: str, line: str) -> list[str]:
        """The check of an index into an array of the thread's own."""
        array, pointer, *indices = split_operands(body.split("getelementptr ", 1)[1])
        own = pointer.startswith("ptr %") and not self.function.in_headers and self.traced
        if not own or len(indices) != 2 or not indices[1].startswith("i64 %"):
            return []
        size = re.match(r"\[(\d+) x", array)[1]
        return [
            self._call(f"@metal_host_index({indices[1]}, i64 {size}, i32 {self._site(line)})", line)
        ]

    def _access(self, body: str, line: str) -> list[str]:
        """The hook for a load, a store or an atomic instruction."""
        if match := _LOAD.match(body):
            kind, (type_, pointer) = READS, split_operands(match[2])[:2]
        elif match := _STORE.match(body):
            value, pointer = split_operands(match[2])[:2]
            kind, type_ = WRITES, leading_type(value)
        elif match := _EXCHANGE.match(body):
            pointer, value = split_operands(match[2])[:2]
            kind, type_ = READS | WRITES, leading_type(value)
        else:
            return []
        # clang lowers what it says where it knows the variable behind a cast.
        aligned = max(_alignment(body), natural_alignment(type_))
        atomic = bool(match[1])
        return self._hook(pointer, size_of(type_), kind, line, aligned, atomic=atomic)

    def _component(self, found: Component, line: str) -> list[str]:
        match = _POINTER.match(found.pointer)
        name, space = self._temporary(), match[1]
        address = f"getelementptr {found.element}, {found.pointer}, {found.index}"
        kind = WRITES if found.written else READS
        pointer = f"ptr addrspace({space}) {name}"
        hook = self._hook(pointer, size_of(found.element), kind, line)
        # It is the vector that has to be aligned: an access to none of its bytes.
        aligned = max(_alignment(line), natural_alignment(found.vector))
        hook += self._hook(found.pointer, "0", kind, line, aligned)
        return [f"  {name} = {address}{self._debug(line)}", *hook]

    def _block(self, body: str, line: str) -> list[str]:
        """Copies of whole structs."""
        if not (match := _BLOCK.match(body)):
            return []
        target, source, size = split_operands(match[2])[:3]
        size = size.split(" ", 1)[1]
        hooks = self._hook(target, size, WRITES, line, _alignment(target))
        if match[1] != "memset":
            hooks = self._hook(source, size, READS, line, _alignment(source)) + hooks
        return hooks

    def _hook(
        self,
        pointer: str,
        size: str,
        kind: int,
        line: str,
        aligned: int = 1,
        *,
        atomic: bool = False,
    ) -> list[str]:
        match = _POINTER.match(pointer)
        space = match[1] or "0" if match else "0"
        if not self.traced or (space == "0" and not is_generic(pointer, self.function.generic)):
            return []
        if space == "1" and "@" in match[2]:
            return []  # a constant of the compiler's: buffers are no variables
        type_ = "ptr" if space == "0" else f"ptr addrspace({space})"
        if atomic or self.function.atomic:
            kind |= ATOMICALLY
        kind |= aligned << ALIGNMENT
        before, site = self._site_operand(line)
        operand = _ORDERING.sub("", match[2])
        arguments = f"{type_} {operand}, i64 {size}, i32 {kind}, i32 {site}"
        return [*before, self._call(f"@metal_host_access_{space}({arguments})", line)]

    # Arithmetic, calls

    def _fused(self, line: str, match: re.Match) -> list[str]:
        """a * b + c: counted in the kernel's text, and rounded twice everywhere."""
        result, operands = match[1], split_operands(match[2])
        type_ = leading_type(operands[0])
        a, b, c = (operand[len(type_) + 1 :] for operand in operands)
        debug, product = self._debug(line), self._temporary()
        lines = [
            f"  {product} = fmul {type_} {a}, {b}{debug}",
            f"  {result} = fadd {type_} {product}, {c}{debug}",
        ]
        if self.traced and not self.function.in_headers:
            lanes = re.match(r"<(\d+) x", type_)
            count = lanes[1] if lanes else "1"
            lines.insert(0, self._call(f"@metal_host_multiply_accumulate(i64 {count})", line))
        return lines

    def _divisor(self, operands: str, line: str) -> list[str]:
        """The check of what divides integers, which would end the process if it were zero."""
        dividend, divisor = split_operands(operands)[:2]
        type_ = leading_type(dividend)
        if not re.search(r"%|zeroinitializer|\b0\b", divisor):
            return []
        vector = re.match(r"<(\d+) x (\w+)>", type_)
        before, site = self._site_operand(line)
        for lane in range(int(vector[1]) if vector else 1):
            element, value = vector[2] if vector else type_, divisor
            if vector:
                value = self._temporary()
                before.append(f"  {value} = extractelement {type_} {divisor}, i32 {lane}")
            if element != "i64":
                wide = self._temporary()
                before.append(f"  {wide} = zext {element} {value} to i64")
                value = wide
            before.append(self._call(f"@metal_host_divisor(i64 {value}, i32 {site})", line))
        return before

    def _note_call(self, body: str, line: str) -> list[str]:
        """Remembers where the kernel's text calls a header, for reports from in there."""
        match = _CALLEE.search(body)
        if self.function.in_headers or not match or match[1] not in self.sharing:
            return []
        return [f"  store i32 {self._site(line)}, ptr @metal_host_site{self._debug(line)}"]

    def _site_operand(self, line: str) -> tuple[list[str], str]:
        if not self.function.in_headers:
            return [], str(self._site(line))
        name = self._temporary()
        return [f"  {name} = load i32, ptr @metal_host_site{self._debug(line)}"], name

    def _site(self, line: str) -> int:
        match = _DEBUG.search(line)
        location = self.debug.location(match[1]) if match else ("", 0, 0)
        if location not in self.site_numbers:
            self.site_numbers[location] = len(self.program.sites)
            self.program.sites.append(location)
        return self.site_numbers[location]

    def _debug(self, line: str) -> str:
        match = _DEBUG.search(line)
        return match[0] if match else ""

    def _call(self, call: str, line: str) -> str:
        return f"  call void {call}{self._debug(line)}"

    def _temporary(self) -> str:
        self.temporaries += 1
        return f"%metal_host.{self.temporaries}"


def _alignment(text: str) -> int:
    """What an instruction or an operand says of its pointer, in bytes."""
    match = _ALIGNED.search(text)
    return int(match[1]) if match else 1


def _anywhere(line: str) -> str:
    """An access that works at any address: a misaligned one must not end the process."""
    if "= alloca " in line or "atomic" in line or "cmpxchg" in line:
        return line  # a thread's own variables stay aligned, as other functions expect
    return _ALIGNED.sub("align 1", line)
