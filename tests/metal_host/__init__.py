"""Executes Metal Shading Language on the CPU, and watches it: see README.md."""

from .custom_kernels import execute, recording, run
from .library import Library, Output
from .report import Fault, Report
from .translation.toolchain import CompileError

__all__ = [
    "CompileError",
    "Fault",
    "Library",
    "Output",
    "Report",
    "execute",
    "recording",
    "run",
]
