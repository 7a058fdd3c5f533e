"""Kernels that MLX ships as headers: launched by hand, with every buffer given."""

from dataclasses import dataclass, field

import numpy as np

from .launching import CONSTANT, DEVICE, INITIALISED, UNWRITTEN, Argument, Kernel
from .report import Report
from .translation.building import Source, build
from .translation.signature import Parameter


@dataclass
class Output:
    """A buffer that a kernel fills: nothing may read an element before it is written."""

    array: np.ndarray


@dataclass
class Library:
    """`source`: Metal text, or the path of a header as MLX includes it.

    `instantiations`: name of each kernel -> template expression, `attention<float, 32>`.
    `constants`: values of the function constants by their number.
    """

    source: str
    instantiations: dict[str, str]
    constants: dict[int, object] = field(default_factory=dict)
    trace: bool = True
    optimise: int = 2

    def launch(
        self,
        name: str,
        buffers: list[np.ndarray | bytes | Output | None],
        threadgroups: tuple[int, int, int],
        threads: tuple[int, int, int],
        seed: int = 0,
    ) -> Report:
        """Runs `threadgroups` groups of `threads` threads; arrays are changed in place.

        Arrays are row-contiguous (bfloat16: as uint16); structs and scalars are bytes; None
        stands for what the function constants leave out.
        """
        kernel = self._kernel(name)
        bound = {p.buffer: p for p in kernel.compiled.parameters if p.buffer is not None}
        arguments = [
            _argument(buffer, bound[i]) if i in bound else None for i, buffer in enumerate(buffers)
        ]
        grid = tuple(g * t for g, t in zip(threadgroups, threads, strict=True))
        report = kernel.launch(arguments, grid, threads, seed)
        for buffer, argument in zip(buffers, arguments, strict=True):
            array = buffer.array if isinstance(buffer, Output) else buffer
            if argument and isinstance(array, np.ndarray):
                array[...] = argument.data.view(array.dtype).reshape(array.shape)
        return report

    def _kernel(self, name: str) -> Kernel:
        expression = self.instantiations[name]
        function = expression.split("<")[0].strip()
        constants = tuple(sorted(self.constants.items()))
        text = self.source if "\n" in self.source else f'#include "{self.source}"\n'
        source = Source(text, "library.metal", function, expression, constants)
        return Kernel(function, build(source, self.trace, self.optimise), self.trace)


def _argument(buffer, parameter: Parameter) -> Argument | None:
    if buffer is None:
        return None
    space = CONSTANT if parameter.constant else DEVICE
    if isinstance(buffer, bytes):
        data = np.frombuffer(buffer, np.uint8)
        return Argument(parameter.name, data, None, space, False, parameter.read_only)
    array = buffer.array if isinstance(buffer, Output) else buffer
    data = np.frombuffer(array.tobytes(), np.uint8)
    state = np.full(data.size, INITIALISED, np.uint8)
    if isinstance(buffer, Output):
        state[:] = UNWRITTEN
        data = np.full(data.size, 0xFF, np.uint8)
    return Argument(parameter.name, data, state, space, read_only=parameter.read_only)
