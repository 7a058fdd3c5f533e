"""From a kernel's Metal text to a loaded library, kept in the cache."""

import ctypes
import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import mlx.core as mx

from ..report import Fault
from ..tracing.instrumentation import Program, instrument
from .address_spaces import check_address_spaces
from .rewriting import rewrite
from .signature import Parameter, entry, kernel_parameters
from .toolchain import LANGUAGE, CompileError, cached, compile_cpp, digest, linking, target, version

HERE = Path(__file__).parents[1]
HEADERS = HERE / "include"
RUNTIME = HERE / "runtime"
#: where the wheel keeps the headers of MLX's kernels
MLX_INCLUDE = Path(mx.__file__).parent / "include"
#: what MLX puts before the source of every kernel
PREAMBLE = "mlx/backend/metal/kernels/utils.h"

_DIALECT = ["-D__METAL__", "-D__METAL_VERSION__=320"]
#: to intermediate code: as the source says, nothing merged, nothing left out
_FRONT = [*LANGUAGE, *_DIALECT, "-S", "-emit-llvm", "-O1", "-g1", "-w", "-fvisibility=hidden"]
# The folder would be cut off paths that begin like it.
_FRONT += ["-ferror-limit=0", "-fdebug-compilation-dir=metal_host"]
_FRONT += ["-ffp-contract=on", "-ftrivial-auto-var-init=pattern", "-fno-strict-aliasing", "-fwrapv"]
for _option in (
    "-disable-llvm-passes",
    "-cl-single-precision-constant",
    "-ffloat16-excess-precision=none",
    "-fbfloat16-excess-precision=none",
):
    _FRONT += ["-Xclang", _option]
_SYCL = ["-Xclang", "-fsycl-is-device", "-Xclang", "-ffake-address-space-map"]
_ABOUT_STRUCTS = re.compile(
    r"no matching constructor for initialization|no viable overloaded '='"
    r"|cannot initialize object parameter|no viable conversion from"
)
#: what makes a library out of a kernel
_BACK = ["-fPIC", "-ffp-contract=off", "-fno-sanitize=undefined", "-Wl,-s"]
_RUNTIME = [*LANGUAGE, "-O2", "-Wall", "-Wextra", "-Werror"]
# `#pragma metal_host include metal_stdlib`, as _preprocess leaves it
_SYSTEM_INCLUDE = re.compile(r"^#pragma metal_host include (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Source:
    """A kernel's text. `text` may include headers of MLX; `file` is its name in messages."""

    text: str
    file: str
    function: str
    #: the function with its template arguments, `attention<float, 32>`
    expression: str
    constants: tuple[tuple[int, object], ...] = ()


@dataclass(frozen=True)
class Compiled:
    """A loaded library with one kernel."""

    source: Source
    library: ctypes.CDLL
    program: Program
    parameters: list[Parameter]

    def address(self, name: str) -> int:
        """Where a function or table of the library is."""
        return ctypes.addressof(ctypes.c_char.in_dll(self.library, name))

    def array_bytes(self) -> dict[str, int]:
        """The sizes of the threadgroup's arrays that the kernel uses."""
        program = self.program
        entries = (ctypes.c_uint64 * (2 * len(program.arrays))).from_address(
            self.address("metal_host_arrays")
        )
        return {program.arrays[i]: entries[2 * i + 1] for i in program.used}


@cache
def build(source: Source, traced: bool = True, optimise: int = 2) -> Compiled:
    """`traced`: accesses and multiply-accumulates are checked and counted."""
    key = digest(repr(source), _fingerprint(), f"{traced} {optimise}")
    folder = cached(key, lambda target: _build(source, target, traced, optimise))
    about = json.loads((folder / "program.json").read_text())
    parameters = [Parameter(**values) for values in about.pop("parameters")]
    runtime()  # its symbols first
    library = ctypes.CDLL(str(folder / "kernel.so"))
    return Compiled(source, library, Program(**about), parameters)


def _build(source: Source, folder: Path, traced: bool, optimise: int) -> None:
    text = _preprocess(source, folder)
    check_address_spaces(text, str(MLX_INCLUDE))
    parameters = kernel_parameters(text, source.function)
    text = rewrite(text, dict(source.constants))
    text = _SYSTEM_INCLUDE.sub(r"#include <\1>", text)
    (folder / "kernel.cpp").write_text(text + entry(source.expression, parameters))
    code, converts = _intermediate_code(folder)
    program = instrument(code, str(HERE), traced)
    if converts:
        program.casts = []
    (folder / "kernel.ll").write_text(program.text)
    compile_cpp(folder, *_BACK, *linking(), f"-O{optimise}", "kernel.ll", "-o", "kernel.so")
    program.text = ""
    about = asdict(program) | {"parameters": [asdict(p) for p in parameters]}
    (folder / "program.json").write_text(json.dumps(about))


def _intermediate_code(folder: Path) -> tuple[str, bool]:
    """kernel.cpp in LLVM IR, in clang's plain C++ if that will do; whether it would not.

    There, nothing converts between address spaces. But structs outside of a thread's own memory
    cannot be copied, nor their members called; in SYCL's dialect they can.
    """
    command = [*_FRONT, f"-I{HEADERS}", "kernel.cpp", "-o", "kernel.ll"]
    converts = False
    try:
        compile_cpp(folder, *command)
    except CompileError as refusal:
        mistakes = [e for e in refusal.errors if not _ABOUT_STRUCTS.search(e)]
        if about_spaces := [e for e in mistakes if _is_about_spaces(e)]:
            raise Fault("address space", about_spaces[0], where=about_spaces[0]) from refusal
        if mistakes:
            raise
        compile_cpp(folder, *command, *_SYCL, "-Xclang", "-aux-triple", "-Xclang", target()[1])
        converts = True
    # The one space of SYCL's that has another number.
    return (folder / "kernel.ll").read_text().replace("addrspace(5)", "addrspace(2)"), converts


def _is_about_spaces(error: str) -> bool:
    """Whether a message of the compiler tells of types in different address spaces."""
    spaces = [
        frozenset(re.findall(r"\b(?:device|constant|threadgroup)\b", type_))
        for type_ in re.findall(r"'([^']*)'", error)
    ]
    return "address space" in error or len(set(spaces)) > 1


def _preprocess(source: Source, folder: Path) -> str:
    """Macros expanded and comments gone; `#include <...>` of the system's headers stays.

    Those define the address spaces as macros, and the later steps need to see the words.
    """
    marked = folder / "system"
    marked.mkdir()
    for header in HEADERS.glob("metal_*"):
        (marked / header.name).write_text(f"#pragma metal_host include {header.name}\n")
    text = f'#include "{PREAMBLE}"\n#line 1 "{source.file}"\n{source.text}'
    (folder / "kernel.metal").write_text(text)
    options = ["-E", "-nostdinc", "-x", "c++", "-std=c++20", *_DIALECT]
    includes = [f"-I{marked}", f"-I{MLX_INCLUDE}"]
    compile_cpp(folder, *options, *includes, "kernel.metal", "-o", "kernel.i")
    return (folder / "kernel.i").read_text()


@cache
def runtime() -> ctypes.CDLL:
    """The executor, shared by all kernels of the process."""

    def compile_all(folder: Path) -> None:
        sources = sorted(RUNTIME.glob("*.cpp"))
        objects = [f"{source.stem}.o" for source in sources]
        for source, object_file in zip(sources, objects, strict=True):
            compile_cpp(folder, *_RUNTIME, "-c", str(source), "-o", object_file)
        compile_cpp(folder, *linking(), *objects, "-o", "runtime.so")

    folder = cached(digest("runtime", _texts(RUNTIME), _compiler()), compile_all)
    return ctypes.CDLL(str(folder / "runtime.so"), mode=ctypes.RTLD_GLOBAL)


@cache
def _fingerprint() -> str:
    """Changes with everything but the kernel that decides what its library does."""
    folders = (HERE / "translation", HERE / "tracing", HEADERS, RUNTIME)
    places = [str(HERE), str(MLX_INCLUDE), mx.__version__]
    return digest(*map(_texts, folders), _compiler(), *places)


def _texts(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return "\0".join(f"{path.name}\0{path.read_text()}" for path in files)


def _compiler() -> str:
    return " ".join([version(), *target()])
