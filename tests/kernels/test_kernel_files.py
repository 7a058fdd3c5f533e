"""Kernel files taken apart: what MLX gets, and every form that it would misread is refused."""

import re

import pytest
from kernel_files import SCALE_ROWS, changed, write

from mlx_selective.kernels import KernelError, read_kernel
from mlx_selective.kernels.signature import Buffer
from mlx_selective.kernels.source import KERNEL_FOLDER


def test_a_file_is_taken_apart(tmp_path):
    source = read_kernel(write(tmp_path), tmp_path)
    assert source.name == "scale_rows"
    assert source.header == (
        '#line 1 "rows/scale.metal"\n'
        "\n"
        '#line 1 "tile/tile.h"\n\n#include <metal_stdlib>\nstruct Tile {};\n\n'
        '#line 3 "rows/scale.metal"\n'
    )
    # the body begins on the line of its brace, and ends before the last one
    start = SCALE_ROWS.index("]]) {") + len("]]) {")
    inner = SCALE_ROWS[start : SCALE_ROWS.rindex("}")].rstrip()
    # without comments and indentation, and each line in its place
    inner = "\n".join(line.split("//")[0].strip() for line in inner.split("\n"))
    mention = "// thread_index_in_simdgroup\n"  # declared, not used
    assert source.body == f'#line 12 "rows/scale.metal"\n{inner}\n{mention}'
    signature = source.signature
    assert signature.template == {"T": "typename", "D": "int", "TWICE": "bool"}
    assert signature.inputs == (
        Buffer("x", "T", "device"),
        Buffer("by", "float", "device"),
        Buffer("sizes", "int", "constant"),
    )
    assert signature.outputs == (Buffer("out", "T", "device"),)
    assert signature.extras == ("x_strides",)
    assert signature.attributes == ("thread_position_in_grid", "thread_index_in_simdgroup")


def test_a_kernel_needs_no_template(tmp_path):
    text = changed("template <typename T, int D, bool TWICE>\n", "").replace("T*", "half*")
    assert read_kernel(write(tmp_path, text), tmp_path).signature.template == {}


X = "const device T* x [[buffer(0)]]"
STRIDES = "const constant int64_t* x_strides [[buffer(1)]]"
OUT = "device T* out [[buffer(4)]]"
GRID = "uint3 thread_position_in_grid [[thread_position_in_grid]]"
LAST = "uint thread_index_in_simdgroup [[thread_index_in_simdgroup]]) {"


@pytest.mark.parametrize(
    "old, new, told",
    [
        ("[[kernel]] void scale_rows(", "void scale_rows(", "holds 0 functions"),
        (LAST, LAST + "}\n[[kernel]] void two(device T* o) {", "holds 2 functions"),
        ("(TWICE ? 2 : 1));\n  }\n}", "(TWICE ? 2 : 1));\n  }\n", "'{' is never closed"),
        (LAST, LAST.replace(") {", " {"), "'(' is never closed"),
        (LAST, LAST.replace(" {", ";\nstruct S {"), "scale_rows has no body"),
        ("(TWICE ? 2 : 1));\n  }\n}", "1);\n  }\n}\nint more;", "'int more;' after scale_rows"),
        ("int D,", "float D,", "'float D' is not a typename, int or bool"),
        ("int D,", "int D = 4,", "'int D = 4' is not a typename"),
        (X, X.replace("0", "1"), "must be buffer(0)"),
        (X, X.replace("T*", "U*"), "a type that no array of MLX has"),
        (X, "const T* x [[buffer(0)]]", "not one that MLX can write"),
        (X, X.replace("[[buffer(0)]]", ""), "not one that MLX can write"),
        (X, X.replace("const ", ""), "inputs are const and come first"),
        (X, "const device T& x [[buffer(0)]]", "is no array of MLX"),
        (STRIDES, STRIDES.replace("int64_t", "int"), "must be 'const constant int64_t*'"),
        (STRIDES, STRIDES.replace("constant", "device"), "must be 'const constant int64_t*'"),
        (STRIDES, STRIDES.replace("x_strides", "x_shape"), "must be 'const constant int*'"),
        (STRIDES, STRIDES.replace("x_strides", "by_strides"), "MLX adds a parameter"),
        (OUT, "const " + OUT, "needs an output"),
        (OUT, OUT.replace("device", "constant"), "is no array of MLX"),
        (OUT, OUT.replace("device", "threadgroup"), "not one that MLX can write"),
        (GRID, GRID.replace("uint3", "uint"), "must be uint3 thread_position_in_grid"),
        (GRID, GRID.replace("grid [", "g ["), "must be uint3 thread_position_in_grid"),
        (GRID, "uint3 at [[position]]", "not one that MLX can write"),
        ("const uint row = ", "uint sizes_ndim = 1; const uint row = ", "says sizes_ndim: MLX"),
        ("// \"}\" in", "// \u00a7 in", "line 13: MLX passes kernels on as ASCII only"),
    ],
)  # fmt: skip
def test_what_mlx_would_misread_is_refused(old, new, told, tmp_path):
    path = write(tmp_path, changed(old, new))
    with pytest.raises(KernelError) as error:
        read_kernel(path, tmp_path)
    message = str(error.value)
    assert message.startswith(path) and told in message and "\n" not in message


def test_inputs_come_before_outputs(tmp_path):
    swapped = changed(OUT, "device T* out [[buffer(3)]],\n    const device float* y [[buffer(4)]]")
    swapped = swapped.replace("    const constant int* sizes [[buffer(3)]],\n", "")
    with pytest.raises(KernelError, match="inputs are const and come first"):
        read_kernel(write(tmp_path, swapped), tmp_path)


def test_what_mlx_adds_stands_behind_its_input(tmp_path):
    by = "const device float* by [[buffer(1)]]"
    late = changed(STRIDES, by).replace("    const device float* by [[buffer(2)]],\n", "")
    late = late.replace(by, f"{by},\n    {STRIDES.replace('1', '2')}")
    with pytest.raises(KernelError, match="x_strides must stand right behind the input"):
        read_kernel(write(tmp_path, late), tmp_path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(KernelError, match=r"^no/such.metal cannot be read: No such file"):
        read_kernel("no/such.metal", tmp_path)


@pytest.mark.parametrize(
    "path", sorted(p.relative_to(KERNEL_FOLDER).as_posix() for p in KERNEL_FOLDER.rglob("*.metal"))
)
def test_names_are_no_words_of_metal(path):
    """Apple's compiler takes them for a function's qualifier, as it does `kernel`."""
    source = read_kernel(path)
    assert not re.search(r"\b(fragment|vertex)\b", source.header + source.body)
