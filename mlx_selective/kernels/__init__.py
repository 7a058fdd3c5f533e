"""The kernels of ``metal/`` as functions, and the choice between them and plain MLX.

A caller asks a function such as :func:`ssa_temperature`, which runs a kernel where one applies
and returns None where plain MLX has to compute; its own caller sees one function. The setting
``MLX_SELECTIVE_KERNELS`` (auto, off, metal, cuda) says where kernels run.

For tests: ``with record() as ran`` tells which way each call went, ``with launched_by(launcher)``
runs the kernels elsewhere than on a GPU.

A new kernel is a file here (when it applies, its block sizes, its launch) and one under ``metal/``.
"""

from .backend import SETTING, Backend, find_backend
from .errors import KernelError
from .hooks import Ran, launched_by, outputs_start_as, record
from .kernel import Kernel
from .source import KernelSource, read_kernel
from .ssa import ssa_temperature

__all__ = [
    "SETTING",
    "Backend",
    "Kernel",
    "KernelError",
    "KernelSource",
    "Ran",
    "find_backend",
    "launched_by",
    "outputs_start_as",
    "read_kernel",
    "record",
    "ssa_temperature",
]
