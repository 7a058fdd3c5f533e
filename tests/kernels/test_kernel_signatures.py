"""The signature that each kernel file declares is the one that MLX writes for it."""

import re

import mlx.core as mx
import pytest
from kernel_files import generated, write

from mlx_selective.kernels import Kernel
from mlx_selective.kernels.signature import ATTRIBUTES, CONSTANT_BELOW, EXTRAS, TYPES
from mlx_selective.kernels.source import KERNEL_FOLDER

FILES = sorted(
    file.relative_to(KERNEL_FOLDER).as_posix() for file in KERNEL_FOLDER.rglob("*.metal")
)
MLX_TYPES = {"int": "int32_t", "half": "float16_t", "bfloat": "bfloat16_t", "uint": "uint32_t"}
DTYPES = {"float": mx.float32, "int": mx.int32, "uint": mx.uint32, "half": mx.float16}


def declared(text: str) -> tuple[str, list[str]]:
    """The template and the parameters in a Metal text, as they stand there."""
    text = re.sub(r"//[^\n]*", "", text)
    pattern = r"(template\s*<[^<>]*>)?\s*\[\[kernel\]\] void \w+\((.*?)\)\s*\{"
    template, parameters = re.search(pattern, text, re.S).groups()
    parts = [" ".join(part.split()) for part in parameters.split(",")]
    return " ".join((template or "").split()), parts


def as_mlx_writes(parameter: str, T: str) -> str:
    """A parameter of a file with MLX's names of types."""
    if "buffer" not in parameter or re.search(r"_(shape|strides|ndim) \[", parameter):
        return parameter
    known = {**MLX_TYPES, "T": T, "O": T, "M": T}
    return re.sub(r"\w+(?=\*)", lambda match: known.get(match[0], match[0]), parameter)


def call_of(kernel: Kernel, dtype: mx.Dtype):
    """A launch of any kernel, with arrays of the smallest kind that it declares."""
    signature = kernel.source.signature
    arrays = [
        mx.zeros((2, 2, 2, 2) if one.space == "device" else (2,), DTYPES.get(one.type, dtype))
        for one in signature.inputs
    ]
    values = {"typename": dtype, "int": 64, "bool": True}

    def launch(*inputs):
        return kernel(
            inputs=inputs,
            template={name: values[kind] for name, kind in signature.template.items()},
            grid=(32, 1, 1),
            threadgroup=(32, 1, 1),
            output_shapes=[(8,) for _ in signature.outputs],
            output_dtypes=[DTYPES.get(one.type, dtype) for one in signature.outputs],
        )

    return launch, arrays


def check(kernel: Kernel, dtype: mx.Dtype, T: str):
    launch, arrays = call_of(kernel, dtype)
    (text,) = generated(launch, *arrays)
    own_template, own = declared((kernel.folder / kernel.path).read_text())
    template, parameters = declared(text[len(kernel.source.header) :])
    assert template == own_template
    own = [as_mlx_writes(parameter, T) for parameter in own]
    buffers = [parameter for parameter in parameters if "buffer" in parameter]
    # MLX has its own order of attributes, which says nothing
    assert own[: len(buffers)] == buffers
    assert sorted(own) == sorted(parameters)


@pytest.mark.parametrize(
    "dtype, T", [(mx.float32, "float"), (mx.float16, "float16_t"), (mx.bfloat16, "bfloat16_t")]
)
@pytest.mark.parametrize("path", FILES)
def test_mlx_writes_what_the_file_declares(path, dtype, T):
    check(Kernel(path), dtype, T)


def test_the_comparison_sees_a_difference(tmp_path):
    kernel = Kernel(write(tmp_path), tmp_path)
    check(kernel, mx.float16, "float16_t")
    assert kernel.source.name == "scale_rows"  # read before the file changes
    file = tmp_path / kernel.path
    right = file.read_text()
    for old, new in (
        ("device float* by", "device int* by"),
        ("constant int* sizes", "device int* sizes"),
        ("[[buffer(4)]]", "[[buffer(5)]]"),
        ("uint3 thread_", "uint thread_"),
        ("int64_t* x_strides", "int* x_strides"),
    ):
        file.write_text(right.replace(old, new))
        with pytest.raises(AssertionError):
            check(kernel, mx.float16, "float16_t")


def written_by_mlx(body: str, x: mx.array) -> list[str]:
    """The parameters that MLX writes for a body with one input."""
    kernel = mx.fast.metal_kernel(
        name="words", input_names=["x"], output_names=["out"], source=body
    )

    def function(x):
        one = (1, 1, 1)
        return kernel(
            inputs=[x], grid=one, threadgroup=one, output_shapes=[(8,)], output_dtypes=[x.dtype]
        )

    texts = []
    mx.export_function(lambda told: texts.extend(told.get("arguments", [])), function, x)
    (text,) = [text for text in texts if isinstance(text, str) and "[[kernel]]" in text]
    return declared(text)[1]


def test_mlx_adds_what_the_loader_expects():
    extras = [f"x{ending}" for ending in EXTRAS]
    parameters = written_by_mlx(" ".join([*ATTRIBUTES, *extras]), mx.zeros((2, 8)))
    about = [parameter for parameter in parameters if "buffer" in parameter]
    assert about[1:-1] == [
        f"const constant {type_} x{ending} [[buffer({number})]]"
        for number, (ending, type_) in enumerate(EXTRAS.items(), 1)
    ]
    rest = set(parameters) - set(about)
    assert rest == {f"{type_} {name} [[{name}]]" for name, type_ in ATTRIBUTES.items()}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_mlx_names_types_and_spaces_as_the_loader_expects(dtype):
    for size, space in ((CONSTANT_BELOW - 1, "constant"), (CONSTANT_BELOW, "device")):
        x, out = written_by_mlx("", mx.zeros((size,), dtype))
        assert x == f"const {space} {TYPES[dtype][0]}* x [[buffer(0)]]"
        assert out == f"device {TYPES[dtype][0]}* out [[buffer(1)]]"
