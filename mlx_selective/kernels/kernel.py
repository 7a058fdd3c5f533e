"""A kernel of ``metal/`` as a callable, built on first use for the backend it runs on."""

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from .backend import find_backend
from .errors import KernelError
from .hooks import current_launcher, first_value, is_watched, note
from .signature import CONSTANT_BELOW, TYPES, Buffer
from .source import KERNEL_FOLDER, KernelSource, read_kernel

#: what a value of each kind of template parameter is; bool is an int too, so type() decides
_KINDS = {"typename": mx.Dtype, "int": int, "bool": bool}


class Kernel:
    """One kernel file; nothing is read before the first use, nothing compiled before MLX runs it.

    Args:
        path: of the file under ``metal/``, such as ``ssa/temperature.metal``.
        folder: of all kernel sources, if they are not the package's own.
        overwrites: names of inputs that the kernel writes. MLX does not know of it: a launch that
            needs the old or the new content must also take what another launch gave after it.
    """

    def __init__(self, path: str, folder: Path = KERNEL_FOLDER, overwrites: Collection[str] = ()):
        self.path = path
        self.overwrites = overwrites
        self.folder = folder
        self._built: dict[tuple[str, int], object] = {}

    @cached_property
    def source(self) -> KernelSource:
        """The file, taken apart.

        Raises:
            KernelError: if the file is not as MLX needs it.
        """
        return read_kernel(self.path, self.folder)

    @property
    def name(self) -> str:
        """The name of the kernel's function."""
        return self.source.name

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array],
        template: dict[str, mx.Dtype | int | bool],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        shared_memory: int = 0,
    ) -> list[mx.array]:
        """Launches the kernel on the backend of the moment; see :meth:`prepare`.

        Args:
            inputs: in the file's order. Where the file declares no strides of an input, it gets
                a row-contiguous one, copied if need be.

        Returns:
            The outputs, in the file's order, not evaluated yet.

        Raises:
            KernelError: if the call does not fit what the file declares, or no backend is here.
        """
        self._check_template(template)
        self.check_inputs(inputs, template)
        prepared = self.prepare(
            template=template,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=output_shapes,
            output_dtypes=output_dtypes,
            shared_memory=shared_memory,
        )
        return prepared(*inputs)

    def prepare(
        self,
        *,
        template: dict[str, mx.Dtype | int | bool],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        shared_memory: int = 0,
        numbers: Sequence[mx.array] = (),
    ) -> "Launch":
        """All of a launch but its arrays, checked once: what calls of one shape can keep.

        Args:
            template: a value for each template parameter.
            grid: threads in all, as in Metal; CUDA starts whole threadgroups, so check bounds.
            threadgroup: threads in a threadgroup, (n, 1, 1).
            output_shapes: in the file's order.
            output_dtypes: in the file's order.
            shared_memory: bytes of dynamic shared memory on CUDA; Metal declares its own.
            numbers: the file's last inputs, the same in every call, and row-contiguous.

        Raises:
            KernelError: if this does not fit what the file declares, or no backend is here.
        """
        backend = find_backend()
        if backend.name is None:
            raise KernelError(f"{self.name} has nowhere to run: {backend.reason}.")
        self._check_template(template)
        self._check_outputs(output_shapes, output_dtypes, template)
        if tuple(threadgroup[1:]) != (1, 1):
            raise KernelError(f"{self.name}: threadgroups have one axis, got {threadgroup}.")
        call = {
            "template": [(name, template[name]) for name in self.source.signature.template],
            "grid": tuple(grid),
            "threadgroup": tuple(threadgroup),
            "output_shapes": [tuple(shape) for shape in output_shapes],
            "output_dtypes": list(output_dtypes),
        }
        return Launch(self, backend.name, shared_memory, call, list(numbers))

    def build(self, backend: str, shared_memory: int):
        """MLX's kernel object; CUDA fixes its shared memory when it is made."""
        key = (backend, shared_memory if backend == "cuda" else 0)
        if key not in self._built:
            signature = self.source.signature
            options = {
                "name": f"mlx_selective_{self.name}",
                "input_names": [one.name for one in signature.inputs],
                "output_names": [one.name for one in signature.outputs],
                "header": self.source.header,
                "source": self.source.body,
                "ensure_row_contiguous": not self.strided,
            }
            if backend == "cuda":
                self._built[key] = mx.fast.cuda_kernel(**options, shared_memory=shared_memory)
            else:
                self._built[key] = mx.fast.metal_kernel(**options)
        return self._built[key]

    @cached_property
    def strided(self) -> set[str]:
        """The inputs whose strides the file declares."""
        signature = self.source.signature
        return {one.name for one in signature.inputs} & {
            name.removesuffix("_strides") for name in signature.extras if name.endswith("_strides")
        }

    def _check_template(self, template) -> None:
        kinds = self.source.signature.template
        if set(template) != set(kinds):
            raise KernelError(f"{self.name} takes template {list(kinds)}, got {list(template)}.")
        for name, kind in kinds.items():
            if type(template[name]) is not _KINDS[kind]:
                raise KernelError(f"{self.name}: {name} is {kind}, got {template[name]!r}.")

    def check_inputs(self, inputs: Sequence[mx.array], template) -> None:
        """Whether arrays are what the file declares.

        Raises:
            KernelError: naming the input that is not.
        """
        declared = self.source.signature.inputs
        if len(inputs) != len(declared):
            raise KernelError(f"{self.name} takes {len(declared)} inputs, got {len(inputs)}.")
        for one, array in zip(declared, inputs, strict=True):
            self._check_dtype(one, array.dtype, template)
            space = "constant" if array.size < CONSTANT_BELOW else "device"
            if array.ndim == 0:
                raise KernelError(f"{self.name}: {one.name} must have an axis, even for a number.")
            if space != one.space:
                raise KernelError(
                    f"{self.name} declares {one.name} as {one.space}, but MLX puts an array of "
                    f"{array.size} elements into {space} (from {CONSTANT_BELOW} on into device)."
                )

    def _check_outputs(self, shapes, dtypes, template) -> None:
        declared = self.source.signature.outputs
        if not len(shapes) == len(dtypes) == len(declared):
            raise KernelError(
                f"{self.name} has {len(declared)} outputs; give each shape and dtype."
            )
        for one, shape, dtype in zip(declared, shapes, dtypes, strict=True):
            self._check_dtype(one, dtype, template)
            if math.prod(shape) == 0:
                raise KernelError(f"{self.name}: output {one.name} of shape {shape} is empty.")

    def _check_dtype(self, one: Buffer, dtype: mx.Dtype, template) -> None:
        fitting = [known for known, names in TYPES.items() if one.type in names]
        if one.type in template:
            fitting = [template[one.type]]
        if dtype not in fitting:
            raise KernelError(f"{self.name} declares {one.type}* {one.name}, got {dtype}.")


class Launch:
    """A kernel with all that one of its launches needs but the arrays.

    Made by :meth:`Kernel.prepare`, for calls whose inputs do not differ in shape: they are checked
    in the first call, and where dtypes are others than in the call before.
    """

    def __init__(self, kernel: Kernel, backend: str, shared_memory: int, call: dict, numbers: list):
        self.backend = backend
        self._kernel = kernel
        self._shared_memory = shared_memory
        self._call = call
        self._numbers = numbers
        self._dtypes: list[mx.Dtype] | None = None
        self._copied: list[bool] = []
        self._built = None

    def __call__(self, *inputs: mx.array) -> list[mx.array]:
        """The outputs, in the file's order, not evaluated yet.

        Args:
            inputs: the arrays in the file's order, without the prepared numbers.

        Raises:
            KernelError: if they are not what the file declares.
        """
        dtypes = [array.dtype for array in inputs]
        if dtypes != self._dtypes:
            self._look_at([*inputs, *self._numbers])
            self._dtypes = dtypes
        arrays = [
            mx.contiguous(array) if copied else array
            for array, copied in zip(inputs, self._copied, strict=False)
        ]
        arrays += self._numbers
        if is_watched():
            return self._call_watched(arrays)
        if self._built is None:
            self._built = self._kernel.build(self.backend, self._shared_memory)
        return self._built(inputs=arrays, **self._call)

    def _look_at(self, arrays: list[mx.array]) -> None:
        """What has to be known of the inputs."""
        kernel = self._kernel
        kernel.check_inputs(arrays, dict(self._call["template"]))
        # MLX itself can copy all inputs that are not row-contiguous, or none
        declared = kernel.source.signature.inputs
        self._copied = [bool(kernel.strided) and one.name not in kernel.strided for one in declared]

    def _call_watched(self, arrays: list[mx.array]) -> list[mx.array]:
        """Where somebody records, poisons outputs or launches by other means."""
        call = self._call | {"inputs": arrays}
        if first_value() is not None:
            call["init_value"] = first_value()
        note(lambda: self._kernel.name, self.backend)
        built = self._kernel.build(self.backend, self._shared_memory)
        launcher = current_launcher()
        if launcher is None:
            return built(**call)
        if self._kernel.overwrites:
            call["overwrites"] = self._kernel.overwrites
        return launcher(built, **call)
