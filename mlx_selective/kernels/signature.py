"""The parameters of a kernel as its file declares them, and as MLX will write them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .errors import KernelError

#: Inputs with fewer elements than this are put into ``constant`` by MLX, others into ``device``.
CONSTANT_BELOW = 8
#: What MLX adds for an input ``x`` where the body says ``x_shape``, in the order in which it does.
EXTRAS = {"_shape": "int*", "_strides": "int64_t*", "_ndim": "int&"}
#: What MLX adds where the body says the name, with its type.
ATTRIBUTES = dict.fromkeys(
    (
        "dispatch_quadgroups_per_threadgroup",
        "dispatch_simdgroups_per_threadgroup",
        "quadgroup_index_in_threadgroup",
        "quadgroups_per_threadgroup",
        "simdgroup_index_in_threadgroup",
        "simdgroups_per_threadgroup",
        "thread_execution_width",
        "thread_index_in_quadgroup",
        "thread_index_in_simdgroup",
        "thread_index_in_threadgroup",
        "threads_per_simdgroup",
    ),
    "uint",
) | dict.fromkeys(
    (
        "dispatch_threads_per_threadgroup",
        "grid_origin",
        "grid_size",
        "thread_position_in_grid",
        "thread_position_in_threadgroup",
        "threadgroup_position_in_grid",
        "threadgroups_per_grid",
        "threads_per_grid",
        "threads_per_threadgroup",
    ),
    "uint3",
)
#: Metal's names for MLX's dtypes; MLX writes the first.
TYPES = {
    mx.bool_: ("bool",),
    mx.uint8: ("uint8_t", "uchar"),
    mx.uint16: ("uint16_t", "ushort"),
    mx.uint32: ("uint32_t", "uint"),
    mx.uint64: ("uint64_t", "ulong"),
    mx.int8: ("int8_t", "char"),
    mx.int16: ("int16_t", "short"),
    mx.int32: ("int32_t", "int"),
    mx.int64: ("int64_t", "long"),
    mx.float16: ("float16_t", "half"),
    mx.bfloat16: ("bfloat16_t", "bfloat"),
    mx.float32: ("float",),
}

_BUFFER = re.compile(
    r"(const )?(device|constant) (\w+) ?([*&]) ?(\w+) ?\[\[ ?buffer ?\( ?(\d+) ?\) ?\]\]"
)
_ATTRIBUTE = re.compile(r"(\w+) (\w+) ?\[\[ ?(\w+) ?\]\]")
_TEMPLATE = re.compile(r"(typename|int|bool) (\w+)")


def constants(numbers: Sequence[float], dtype: mx.Dtype) -> mx.array:
    """Numbers for a kernel's constant memory, fewer than eight, filled up to four with zeros.

    On CUDA, MLX has arrays of at most eight bytes in the host's memory: a kernel that begins by
    reading one waits two to four microseconds for it.

    Args:
        numbers: at most seven.
        dtype: int32 or float32.

    Returns:
        (4,), or as many as there are numbers.
    """
    return mx.array([*numbers, *[0] * (4 - len(numbers))], dtype)


@dataclass(frozen=True)
class Buffer:
    """An array of a kernel: ``const device T* x [[buffer(0)]]``."""

    name: str
    type: str
    space: str


@dataclass(frozen=True)
class Signature:
    """What stands between a kernel's template and its body.

    ``template`` gives each template parameter its kind, typename, int or bool; ``inputs`` and
    ``outputs`` are the arrays that a call names, ``extras`` what MLX adds about inputs
    (``x_shape``, ``x_strides``, ``x_ndim``), ``attributes`` Metal's own, all in the file's order.
    """

    template: dict[str, str]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    extras: tuple[str, ...]
    attributes: tuple[str, ...]


def parse_template(text: str | None) -> dict[str, str]:
    """Name -> kind of each parameter in ``typename T, int D``; nothing for a kernel without.

    Raises:
        KernelError: if one is none of typename, int and bool, which are what MLX can fill in.
    """
    found = {}
    for part in _parts(text or ""):
        match = _TEMPLATE.fullmatch(part)
        if not match:
            raise KernelError(f"template parameter '{part}' is not a typename, int or bool.")
        found[match[2]] = match[1]
    return found


def parse_signature(template: str | None, parameters: str) -> Signature:
    """Reads the template and the parameters of a kernel, comments taken out before.

    Raises:
        KernelError: if a parameter has another form than MLX writes, or another place.
    """
    kinds = parse_template(template)
    inputs, outputs, extras, attributes, buffers = [], [], [], [], []
    for part in _parts(parameters):
        if match := _BUFFER.fullmatch(part):
            const, space, type_, sign, name, index = match.groups()
            if attributes or int(index) != len(buffers):
                raise KernelError(f"'{part}' must be buffer({len(buffers)}), before attributes.")
            buffers.append(name)
            extra = _extra(name, inputs)
            if extra:
                _check_extra(part, const, space, type_ + sign, extra)
                extras.append(name)
                continue
            if sign == "&" or (outputs and const) or not (const or space == "device"):
                raise KernelError(f"'{part}' is no array of MLX; inputs are const and come first.")
            (inputs if const else outputs).append(Buffer(name, _known(type_, kinds, part), space))
        elif (match := _ATTRIBUTE.fullmatch(part)) and match[3] in ATTRIBUTES:
            if match[2] != match[3] or match[1] != ATTRIBUTES[match[3]]:
                raise KernelError(f"'{part}' must be {ATTRIBUTES[match[3]]} {match[3]}.")
            attributes.append(match[2])
        else:
            raise KernelError(f"parameter '{part}' is not one that MLX can write.")
    if not outputs:
        raise KernelError("a kernel needs an output, 'device TYPE* name [[buffer(n)]]'.")
    return Signature(kinds, tuple(inputs), tuple(outputs), tuple(extras), tuple(attributes))


def added_by_mlx(body: str, inputs: tuple[Buffer, ...]) -> tuple[set[str], set[str]]:
    """Names that MLX adds to the signature for a body: about inputs, and attributes.

    It looks for them anywhere in the text, in comments and inside longer words too.
    """
    about = {one.name + extra for one in inputs for extra in EXTRAS}
    return {name for name in about if name in body}, {name for name in ATTRIBUTES if name in body}


def _parts(text: str) -> list[str]:
    """The parts between commas, with single spaces."""
    parts = [" ".join(part.split()) for part in text.split(",")]
    return [] if parts == [""] else parts


def _extra(name: str, inputs: list[Buffer]) -> str:
    """The ending for which MLX adds this name, right behind its input; "" for an array."""
    endings = [end for end in EXTRAS for one in inputs if name == one.name + end]
    if endings and name != inputs[-1].name + endings[0]:
        raise KernelError(f"{name} must stand right behind the input it describes.")
    return endings[0] if endings else ""


def _check_extra(part: str, const: str | None, space: str, type_: str, extra: str) -> None:
    if not const or space != "constant" or type_ != EXTRAS[extra]:
        raise KernelError(f"'{part}' must be 'const constant {EXTRAS[extra]}'.")


def _known(type_: str, kinds: dict[str, str], part: str) -> str:
    if kinds.get(type_) != "typename" and not any(type_ in names for names in TYPES.values()):
        raise KernelError(f"'{part}' has a type that no array of MLX has.")
    return type_
