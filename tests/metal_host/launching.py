"""Runs a compiled kernel on a grid, with every buffer alone between free spaces."""

import ctypes
import math
import threading
from dataclasses import dataclass

import numpy as np

from .faults import Places, fault
from .report import Fault, Report
from .request import U32, Buffer, Request
from .translation.building import MLX_INCLUDE, Compiled, runtime

DEVICE, CONSTANT = 1, 2
UNWRITTEN, INITIALISED, OUTSIDE = 0, 1, 2  # ByteState of runtime/request.h
MOST_THREADS = 1024
MOST_BUFFERS = 128  # most_buffers of runtime/launch.cpp; Metal has 31
MOST_THREADGROUP_MEMORY = 32768
#: free bytes on both sides of a buffer
GAP = 1 << 16

_running = threading.Lock()  # a library has one executor


@dataclass
class Argument:
    """What is bound to a buffer of a kernel: bytes, and which of them may be touched."""

    name: str
    data: np.ndarray  # uint8; the launch replaces it
    state: np.ndarray | None = None  # of each byte; None: all are initialised
    space: int = DEVICE
    reported: bool = True  # in the counts of bytes
    read_only: bool = False
    start: int = 0  # byte that the kernel's pointer points to


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, its name in reports, and whether it is traced."""

    name: str
    compiled: Compiled
    traced: bool

    def launch(self, arguments: list[Argument | None], grid, threadgroup, seed: int = 0) -> Report:
        """`grid` in threads. The arguments' data become what the kernel leaves there."""
        self._check_casts()
        threads = math.prod(threadgroup)
        if not 0 < threads <= MOST_THREADS:
            raise ValueError(f"a threadgroup of {threads} threads; {MOST_THREADS} are possible")
        if len(arguments) > MOST_BUFFERS:
            raise ValueError(f"{len(arguments)} buffers; {MOST_BUFFERS} are possible")
        sizes = self.compiled.array_bytes()
        memory = sum(sizes.values())
        if memory > MOST_THREADGROUP_MEMORY:
            listing = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise Fault(
                "threadgroup memory",
                f"kernel {self.name}: {memory} bytes of {MOST_THREADGROUP_MEMORY} ({listing})",
            )
        arena = _Arena(arguments)
        request = self._request(arena, grid, threadgroup, seed)
        with _running:
            runtime().metal_host_launch(ctypes.byref(request))
        self._raise_fault(request, arguments)
        arena.take_back(arguments)
        return self._report(request, arena, arguments, memory)

    def _check_casts(self) -> None:
        for site in self.compiled.program.casts:
            if not self.compiled.program.sites[site][0].startswith(str(MLX_INCLUDE)):
                where = Places(self.compiled).describe(site)
                message = f"kernel {self.name}: a cast to another address space at {where}"
                raise Fault("address space", message, where=where)

    def _request(self, arena: "_Arena", grid, threadgroup, seed: int) -> Request:
        request = Request()
        request.function = self.compiled.address("metal_host_function")
        request.array_table = self.compiled.address("metal_host_arrays")
        request.constants = self.compiled.address("metal_host_constants")
        request.constant_count = self.compiled.program.constants
        request.buffers, request.buffer_count = arena.buffers, len(arena.buffers)
        used = self.compiled.program.used
        request.arrays, request.array_count = (U32 * len(used))(*used), len(used)
        request.grid = (U32 * 3)(*grid)
        request.threadgroup = (U32 * 3)(*threadgroup)
        request.seed = seed
        return request

    def _raise_fault(self, request: Request, arguments: list[Argument | None]) -> None:
        if request.fault.kind:
            names = [argument.name if argument else "" for argument in arguments]
            places, arrays = Places(self.compiled), self.compiled.program.arrays
            raise fault(request.fault, self.name, places, names, arrays)

    def _report(self, request: Request, arena: "_Arena", arguments, memory: int) -> Report:
        report = Report(
            kernel=self.name,
            multiply_accumulates=request.multiply_accumulates if self.traced else 0,
            special_functions=request.special_functions,
            barriers=request.barriers,
            simd_operations=request.simd_operations,
            threadgroup_read=request.threadgroup_read,
            threadgroup_written=request.threadgroup_written,
            threadgroup_memory=memory,
            traced=self.traced,
        )
        for argument, buffer in zip(arguments, arena.buffers, strict=True):
            if argument is None or not argument.reported or not self.traced:
                continue
            report.device_read[argument.name] += buffer.read
            report.device_written[argument.name] += buffer.written
            if argument.state is not None:
                left = int(np.count_nonzero(argument.state == UNWRITTEN))
                report.unwritten[argument.name] += left
        return report


class _Arena:
    """One stretch of memory that holds the buffers of a launch, far from each other."""

    def __init__(self, arguments: list[Argument | None]):
        self.offsets, end = [], GAP
        for argument in arguments:
            self.offsets.append(end)
            size = argument.data.size if argument else 0
            end += -(-size // 256) * 256 + GAP
        self.memory = np.empty(end, np.uint8)
        base = self.memory.ctypes.data
        shift = -base % 256  # GAP has room for it
        self.offsets = [offset + shift for offset in self.offsets]
        self.buffers = (Buffer * len(arguments))()
        for buffer, offset, argument in zip(self.buffers, self.offsets, arguments, strict=True):
            if argument is None:
                continue
            self.memory[offset : offset + argument.data.size] = argument.data
            state = None if argument.state is None else argument.state.ctypes.data
            buffer.data, buffer.size, buffer.state = base + offset, argument.data.size, state
            buffer.space, buffer.read_only = argument.space, argument.read_only
            buffer.start = argument.start

    def take_back(self, arguments: list[Argument | None]) -> None:
        for offset, argument in zip(self.offsets, arguments, strict=True):
            if argument is not None:
                argument.data = self.memory[offset : offset + argument.data.size]
