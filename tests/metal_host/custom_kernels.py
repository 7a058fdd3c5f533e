"""Runs kernels of mx.fast.metal_kernel on this machine's processor."""

import re
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import mlx.core as mx
import numpy as np

from .arrays import Value, write_back
from .launching import CONSTANT, DEVICE, Argument, Kernel
from .report import Report
from .translation.building import Source, build
from .translation.signature import Parameter

#: inputs of fewer elements are in the constant address space
SMALL = 8


@dataclass(frozen=True)
class Call:
    """A call of a custom kernel, as MLX would launch it."""

    name: str
    source: str
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    metadata: list[tuple[bool, bool, bool]]  # of each input: takes its shape, strides, ndim
    row_contiguous: bool
    inputs: list[str]
    outputs: list[tuple[str, tuple[int, ...], mx.Dtype]]
    init_value: float | None = None


@dataclass
class _Graph:
    """What a function of arrays does, as told by mx.export_function."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    constants: dict[str, mx.array] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def take(self, event: dict) -> None:
        kind = event["type"]
        if kind in ("inputs", "outputs"):
            setattr(self, kind, [name for name, *_ in event[kind]])
        elif kind == "constants":
            self.constants = dict(event["constants"])
        elif kind == "primitive":
            if event["name"] != "CustomKernel":
                raise ValueError(f"only custom kernels can run here, not {event['name']}")
            self.calls.append(_call(event))


@dataclass
class _Recording:
    reports: list[Report]
    seed: int
    trace: bool


_recordings: list[_Recording] = []


def run(
    fn: Callable,
    *arrays: mx.array,
    seed: int = 0,
    trace: bool = True,
    optimise: int = 2,
    overwrites: Collection[str] = (),
):
    """What `fn(*arrays)` returns, and the report. `fn` calls custom kernels and nothing else.

    `seed`: of the order in which threads and threadgroups run. Without `trace` it is faster, and
    finds divergence only. `optimise`: the compiler's level, for tests of the executor itself.
    `overwrites`: names of inputs that kernels may write; the arrays change in place.
    """
    graph = _export(fn, arrays)
    values: dict[str, mx.array | Value] = dict(zip(graph.inputs, arrays, strict=True))
    values |= graph.constants
    launches = []
    for call in graph.calls:
        settings = (seed + len(launches), trace, optimise, overwrites)
        launches.append(_launch(call, values, *settings))
    results = [values[name] for name in graph.outputs]
    results = [value.array() if isinstance(value, Value) else value for value in results]
    report = launches[0] if len(launches) == 1 else Report.total(launches)
    for recording in _recordings:
        recording.reports.extend(launches)
    return (results[0] if len(results) == 1 else results), report


def execute(
    kernel: Callable,
    *,
    inputs: list,
    stream=None,
    verbose: bool = False,
    overwrites: Collection[str] = (),
    **launch,
) -> list[mx.array]:
    """Like `kernel(inputs=inputs, **launch)` on a GPU, where `overwrites` needs no mention."""
    arrays = [value for value in inputs if isinstance(value, mx.array)]

    def call(*given):
        following = iter(given)
        every = [next(following) if isinstance(v, mx.array) else v for v in inputs]
        return kernel(inputs=every, **launch)

    settings = _recordings[-1] if _recordings else _Recording([], 0, True)
    results, _ = run(call, *arrays, seed=settings.seed, trace=settings.trace, overwrites=overwrites)
    return results if isinstance(results, list) else [results]


@contextmanager
def recording(seed: int = 0, trace: bool = True) -> Iterator[list[Report]]:
    """Collects the reports of all launches inside; `seed` and `trace` are execute's there."""
    current = _Recording([], seed, trace)
    _recordings.append(current)
    try:
        yield current.reports
    finally:
        _recordings.pop()


# From the function to the calls


def _export(fn: Callable, arrays: tuple[mx.array, ...]) -> _Graph:
    mx.eval(arrays)
    graph = _Graph()

    def listed(*given):
        result = fn(*given)
        return result if isinstance(result, (list, tuple)) else [result]

    mx.export_function(graph.take, listed, *arrays)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "function.mlxfn"
        mx.export_function(str(path), listed, *arrays)
        written = path.read_bytes()
    position = 0
    for i, call in enumerate(graph.calls):
        init_value, position = _init_value(call, written, position)
        graph.calls[i] = replace(call, init_value=init_value)
    return graph


def _call(event: dict) -> Call:
    name, source, *numbers = event["arguments"]
    return Call(
        name=name,
        source=source.removeprefix(_own_preamble()),
        grid=tuple(numbers[0:3]),
        threadgroup=tuple(numbers[3:6]),
        metadata=numbers[6],
        row_contiguous=numbers[7],
        inputs=[name for name, *_ in event["inputs"]],
        outputs=[tuple(output) for output in event["outputs"]],
    )


def _init_value(call: Call, written: bytes, start: int) -> tuple[float | None, int]:
    """The callback does not tell it; in the file it follows the call's other numbers."""
    name = call.name.encode()
    at = written.index(struct.pack("<Q", len(name)) + name, start) + 8 + len(name)
    (length,) = struct.unpack_from("<Q", written, at)
    at += 8 + length + 6 * 4 + 8 + 3 * len(call.metadata) + 1
    if written[at] == 0:
        return None, at
    return struct.unpack_from("<f", written, at + 1)[0], at


@cache
def _own_preamble() -> str:
    """What this build of MLX puts before a kernel's header: nothing where there is no Metal."""
    mark = "// here begins the header\n"
    kernel = mx.fast.metal_kernel(
        name="preamble", input_names=[], output_names=["o"], source="o[0] = 0;", header=mark
    )
    sources = []

    def take(event):
        if event["type"] == "primitive":
            sources.append(event["arguments"][1])

    one = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    one |= {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    mx.export_function(take, lambda: kernel(inputs=[], **one))
    return sources[0][: sources[0].index(mark)]


# From a call to a launch


def _launch(call: Call, values, seed: int, trace: bool, optimise: int, overwrites) -> Report:
    kernel = _compile(call, trace, optimise)
    given = [_value(values[name], call.row_contiguous) for name in call.inputs]
    results = [Value.output(s, d, call.init_value) for _, s, d in call.outputs]
    arguments = _arguments(call, kernel.compiled.parameters, given, results, overwrites)
    group = tuple(max(1, min(g, t)) for g, t in zip(call.grid, call.threadgroup, strict=True))
    report = kernel.launch(arguments, call.grid, group, seed)
    own = [argument for argument in arguments if argument.reported]
    for name, argument in zip(call.inputs, own, strict=False):
        if not argument.read_only:
            write_back(argument.data, values[name])
    for (name, *_), value, argument in zip(
        call.outputs, results, arguments[len(arguments) - len(results) :], strict=True
    ):
        value.data = argument.data
        if not trace:
            value.state = None
        values[name] = value
    return report


def _value(value: mx.array | Value, row_contiguous: bool) -> Value:
    return value if isinstance(value, Value) else Value.of(value, row_contiguous)


def _arguments(
    call: Call,
    parameters: list[Parameter],
    inputs: list[Value],
    outputs: list[Value],
    overwrites: Collection[str],
) -> list[Argument]:
    """In the order of the kernel's buffers: each input with what it tells of its shape."""
    names = iter([p.name for p in parameters if p.buffer is not None])
    arguments = []

    def add_metadata(values: list[int], dtype) -> None:
        data = np.array(values, dtype).view(np.uint8)
        arguments.append(Argument(next(names), data, space=CONSTANT, reported=False))

    for value, (shape, strides, ndim) in zip(inputs, call.metadata, strict=True):
        elements = int(np.prod(value.shape, dtype=np.int64))
        space = CONSTANT if elements < SMALL else DEVICE
        name = next(names)
        written = name in overwrites
        given = Argument(name, value.data, value.state, space, read_only=not written)
        given.start = value.start
        arguments.append(given)
        if value.shape:
            if shape:
                add_metadata(list(value.shape), np.int32)
            if strides:
                add_metadata(list(value.strides), np.int64)
            if ndim:
                add_metadata([len(value.shape)], np.int32)
    for value in outputs:
        arguments.append(Argument(next(names), value.data, value.state))
    return arguments


def _compile(call: Call, trace: bool, optimise: int) -> Kernel:
    name = call.name.removeprefix("custom_kernel_")
    instantiated = re.search(rf"decltype\(({re.escape(call.name)}<[^;]*>)\)", call.source)
    expression = instantiated[1] if instantiated else call.name
    source = Source(call.source, f"{name}.metal", call.name, expression)
    return Kernel(name, build(source, trace, optimise), trace)
