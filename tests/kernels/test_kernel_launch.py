"""Calls of a kernel: what MLX is handed, what is refused before, and the record of what ran."""

import mlx.core as mx
import pytest
from kernel_files import SCALE_ROWS, generated, write

from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.attention.selective.definition import selective_step
from mlx_selective.attention.ssa.definition import multiply_rows
from mlx_selective.kernels import (
    Kernel,
    KernelError,
    launched_by,
    outputs_start_as,
    record,
    ssa_temperature,
)

ROWS, D = 10, 4
#: scale_rows of contiguous rows
UNSTRIDED = (
    SCALE_ROWS.replace("    const constant int64_t* x_strides [[buffer(1)]],\n", "")
    .replace("x_strides[0]", "D")
    .replace("buffer(2)", "buffer(1)")
    .replace("buffer(3)", "buffer(2)")
    .replace("buffer(4)", "buffer(3)")
)


@pytest.fixture
def kernel(tmp_path):
    return Kernel(write(tmp_path), tmp_path)


def call(**changes):
    """A right call of scale_rows, with changes."""
    return {
        "inputs": [mx.zeros((ROWS, D), mx.float16), mx.zeros((ROWS,)), mx.array([ROWS])],
        "template": {"TWICE": True, "T": mx.float16, "D": D},
        "grid": (ROWS, 1, 1),
        "threadgroup": (32, 1, 1),
        "output_shapes": [(ROWS, D)],
        "output_dtypes": [mx.float16],
    } | changes


class Launcher:
    """Keeps what it is called with."""

    def __init__(self):
        self.calls = []

    def __call__(self, kernel, **call):
        self.calls.append((kernel, call))
        return [mx.ones(shape) for shape in call["output_shapes"]]


def test_the_launcher_gets_mlxs_kernel_and_call(kernel):
    launcher = Launcher()
    with launched_by(launcher):
        (out,) = kernel(**call())
        kernel(**call())
    assert out.shape == (ROWS, D)
    (built, told), (again, _) = launcher.calls
    assert built is again and "init_value" not in told
    # the file's order
    assert told.pop("template") == [("T", mx.float16), ("D", D), ("TWICE", True)]
    assert [one.shape for one in told.pop("inputs")] == [(ROWS, D), (ROWS,), (1,)]
    assert told == {name: call()[name] for name in told} and len(told) == 4


def test_mlx_gets_the_name_the_header_and_the_body(kernel):
    def function(*inputs):
        return kernel(**call(inputs=list(inputs)))

    (text,) = generated(function, *call()["inputs"])
    assert text.startswith(kernel.source.header)
    assert kernel.source.body in text
    assert "custom_kernel_mlx_selective_scale_rows" in text


def test_outputs_can_start_as_a_number(kernel):
    launcher = Launcher()
    with launched_by(launcher), outputs_start_as(3.5):
        kernel(**call())
    assert launcher.calls[0][1]["init_value"] == 3.5


def test_cuda_fixes_shared_memory_when_the_kernel_is_made(kernel, monkeypatch):
    made = []

    def cuda_kernel(**options):
        made.append(options["shared_memory"])
        return lambda **call: [options["shared_memory"]]

    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx.fast, "cuda_kernel", cuda_kernel)
    sizes = (0, 65536, 0, 65536)
    assert [kernel(**call(shared_memory=size)) for size in sizes] == [[size] for size in sizes]
    assert made == [0, 65536]


def test_an_input_without_declared_strides_is_made_contiguous(kernel):
    """The others are handed on as they are, with their strides."""
    inputs = call()["inputs"]
    inputs[0] = mx.zeros((D, ROWS), mx.float16).T
    inputs[1] = mx.zeros((2 * ROWS,))[::2]
    assert [memoryview(one).strides for one in inputs[:2]] == [(2, 2 * ROWS), (8,)]
    launcher = Launcher()
    with launched_by(launcher):
        kernel(**call(inputs=inputs))
    given = launcher.calls[0][1]["inputs"]
    assert [memoryview(one).strides for one in given] == [(2, 2 * ROWS), (4,), (4,)]


@pytest.mark.parametrize("strided", [True, False])
def test_mlx_makes_all_inputs_contiguous_or_none(tmp_path, monkeypatch, strided):
    made = []
    monkeypatch.setattr(mx.fast, "metal_kernel", lambda **options: made.append(options))
    text = SCALE_ROWS if strided else UNSTRIDED
    with launched_by(Launcher()):
        Kernel(write(tmp_path, text), tmp_path)(**call())
    assert made[0]["ensure_row_contiguous"] is not strided


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"inputs": call()["inputs"][:2]}, "takes 3 inputs, got 2"),
        ({"template": {"T": mx.float16, "D": D}}, "takes template ['T', 'D', 'TWICE'], got"),
        ({"template": {"T": mx.float16, "D": True, "TWICE": True}}, "D is int, got True"),
        ({"template": {"T": mx.float16, "D": D, "TWICE": 1}}, "TWICE is bool, got 1"),
        ({"template": {"T": "half", "D": D, "TWICE": True}}, "T is typename, got 'half'"),
        ({"template": {"T": mx.float32, "D": D, "TWICE": True}}, "declares T* x, got mlx.core.fl"),
        ({"output_dtypes": [mx.float32]}, "declares T* out, got mlx.core.float32"),
        ({"output_shapes": [(ROWS, D), (2,)]}, "has 1 outputs"),
        ({"output_shapes": [(0, D)]}, "output out of shape (0, 4) is empty"),
    ],
)  # fmt: skip
def test_a_call_that_the_file_does_not_declare_is_refused(kernel, changes, told):
    with launched_by(Launcher()), record() as ran, pytest.raises(KernelError) as error:
        kernel(**call(**changes))
    assert str(error.value).startswith("scale_rows") and told in str(error.value)
    assert ran == []


@pytest.mark.parametrize(
    "index, array, told",
    [
        (0, mx.zeros((1, D), mx.float16), "x as device, but MLX puts an array of 4 elements into"),
        (1, mx.zeros((7,)), "by as device, but MLX puts an array of 7 elements into constant"),
        (2, mx.zeros((8,), mx.int32), "sizes as constant, but MLX puts an array of 8 elements"),
        (2, mx.array(3), "sizes must have an axis, even for a number"),
        (2, mx.array([3], mx.uint32), "declares int* sizes, got mlx.core.uint32"),
        (1, mx.zeros((ROWS,), mx.float16), "declares float* by, got mlx.core.float16"),
    ],
)
def test_an_input_that_mlx_would_declare_otherwise_is_refused(kernel, index, array, told):
    inputs = call()["inputs"]
    inputs[index] = array
    with launched_by(Launcher()), pytest.raises(KernelError) as error:
        kernel(**call(inputs=inputs))
    assert told in str(error.value)


def test_without_a_backend_a_launch_is_refused(kernel, monkeypatch):
    monkeypatch.setenv("MLX_SELECTIVE_KERNELS", "off")
    with pytest.raises(KernelError, match="scale_rows has nowhere to run: MLX_SELECTIVE_KERNELS"):
        kernel(**call())


def test_records_and_launchers_nest(kernel):
    outer, inner = Launcher(), Launcher()
    with launched_by(outer), record() as all_of_them:
        with launched_by(inner), record() as some:
            kernel(**call())
        kernel(**call())
    assert len(outer.calls) == len(inner.calls) == 1
    assert some == [("scale_rows", "metal", "")]
    assert all_of_them == some * 2


def test_hooks_end_with_an_exception(kernel):
    for hook in (launched_by(Launcher()), outputs_start_as(1.0), record()):
        with pytest.raises(KeyError), hook:
            raise KeyError
    launcher = Launcher()
    with launched_by(launcher):
        kernel(**call())
    assert "init_value" not in launcher.calls[0][1]


def prepared(kernel):
    settings = call()
    settings["numbers"] = [settings.pop("inputs")[-1]]
    return kernel.prepare(**settings)


def test_a_prepared_launch_looks_again_at_other_dtypes(kernel):
    """The text is compiled for the dtypes of the template: others would be read as these."""
    x, by, _ = call()["inputs"]
    launcher = Launcher()
    with launched_by(launcher):
        launch = prepared(kernel)
        launch(x, by)
        with pytest.raises(KernelError, match="float\\* by, got mlx.core.float16"):
            launch(x, by.astype(mx.float16))
        launch(x, by)
    assert len(launcher.calls) == 2


def test_a_launcher_is_told_which_inputs_are_written(tmp_path):
    launcher = Launcher()
    with launched_by(launcher):
        Kernel(write(tmp_path), tmp_path)(**call())
        Kernel(write(tmp_path), tmp_path, overwrites=("by",))(**call())
    assert [told.get("overwrites") for _, told in launcher.calls] == [None, ("by",)]


def test_no_kernel_begins_with_a_number_in_the_hosts_memory():
    """On CUDA, MLX has arrays of at most eight bytes there, and a kernel waits for one for 2 us."""
    small = {}

    def launcher(kernel, *, inputs, output_shapes, output_dtypes, **_):
        small[len(small)] = [array for array in inputs if array.nbytes <= 8]
        return [mx.zeros(s, t) for s, t in zip(output_shapes, output_dtypes, strict=True)]

    with launched_by(launcher), record() as ran:
        for N in (40, 600):
            q, k, v = mx.zeros((1, 2, 9, 64)), *[mx.zeros((1, 2, N, 64))] * 2
            selective_attention(q, k, v, scale=0.1)
            stick_breaking_attention(q, k, v, scale=0.1)
            stick_breaking_attention(q[:, :, :1], k, v, scale=0.1)
            positions = mx.arange(N)[None]
            state = {"query_positions": positions[:, -1:], "key_positions": positions}
            F = mx.zeros((1, N))
            selective_step(q[:, :, :1], k, v, scale=0.1, F=F, evicts=[1], **state)
        ssa_temperature(q, mx.ones((1, 2, 9, 1)), multiply_rows, smallest=0)
    assert len({one.kernel for one in ran}) == 11
    assert small and not any(small.values())
