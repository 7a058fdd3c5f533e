"""Mistakes in kernels of mx.fast.metal_kernel: found, with the names and lines that MLX knows."""

import mlx.core as mx
import pytest

import metal_host

HERE = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n"
SEEDS = range(4)
WAIT = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def launch(source, seed=0, *, group=64, header="", init_value=None, trace=True, **options):
    """What a kernel of 128 threads leaves."""
    kernel = mx.fast.metal_kernel(
        name="wrong", input_names=["a"], output_names=["o"], source=HERE + source, header=header,
        **options,
    )  # fmt: skip
    given = {} if init_value is None else {"init_value": init_value}

    def call(a):
        return kernel(
            inputs=[a],
            output_shapes=[(128,)],
            output_dtypes=[mx.float32],
            grid=(128, 1, 1),
            threadgroup=(group, 1, 1),
            **given,
        )[0]

    return metal_host.run(call, mx.arange(128).astype(mx.float32), seed=seed, trace=trace)[0]


def fault_of(source, **options):
    """The fault that each of these orders of threads finds; of the last one."""
    for seed in SEEDS:
        with pytest.raises(metal_host.Fault) as caught:
            launch(source, seed, **options)
    return caught.value


def kernel_is_right(source, **options):
    """No order of threads finds a fault."""
    for seed in SEEDS:
        launch(source, seed, **options)


def check(fault, kind, text, **expected):
    """Kind, words of the message, and attributes."""
    assert fault.kind == kind
    assert text in str(fault)
    assert {name: getattr(fault, name) for name in expected} == expected


def test_two_threads_write_one_element():
    check(fault := fault_of("o[i == 77 ? 3 : i] = 1;"), "race", "device buffer `o`")
    assert {(fault.threadgroup, fault.thread), (fault.other_threadgroup, fault.other_thread)} == {
        ((0, 0, 0), 3),
        ((1, 0, 0), 13),
    }
    assert "wrong_float_float.metal:7: o[i == 77 ? 3 : i] = 1;" in str(fault)


def test_bounds_of_a_struct_whose_member_is_called():
    header = "struct Cell { float x; float get() const { return x; } };"
    source = "threadgroup Cell cells[64];\ncells[l].x = a[i];\n" + WAIT
    fault = fault_of(source + "o[i] = cells[l + 1].get();", header=header)
    check(fault, "out of bounds", "threadgroup array `cells`", thread=63)


@pytest.mark.parametrize(("index", "found"), [("l % 5", 4), ("int(l % 5) - 1", -1)])
def test_bounds_of_a_threads_own_array(index, found):
    fault = fault_of(f"float x[4] = {{}};\nx[{index}] = a[i];\no[i] = x[0];")
    check(fault, "out of bounds", f"index {found} of the 4 elements of an array of its own")
    assert fault.thread % 5 == (4 if found == 4 else 0)


def test_unwritten_output():
    check(fault_of("if (i == 9) o[i] = o[i] + a[i];"), "uninitialised read", "`o`", thread=9)
    kernel_is_right("if (i == 9) o[i] = o[i] + a[i];", init_value=1)


def test_private_memory_starts_as_nan():
    assert mx.isnan(launch("float x[4];\nx[0] = a[i];\no[i] = x[1];")).all()


def test_lanes_that_have_returned_take_no_part():
    kernel_is_right("if (l % 32 >= 16) return;\no[i] = simd_sum(a[i]);")


def test_shapes_may_only_be_read():
    fault = fault_of("((constant int*)a_shape)[0] = 1;")
    check(fault, "address space", "byte 0 of the constant buffer `a_shape`")


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    "quotient",
    ["7 / int(a[i] - 9)", "7 % (uint(i) % 64 - 9)", "(int4(7) / int4(1, 2, l - 9, 3)).x", "i / 0u"],
)
def test_integers_divided_by_zero(quotient, trace):
    """Of no consequence on a GPU but for the value; here the process would end."""
    fault = fault_of(f"o[i] = {quotient};", trace=trace)
    check(fault, "division by zero", f"divides an integer by zero at {fault.where}")
    assert fault.thread == 9 or quotient == "i / 0u"


def test_text_that_is_not_for_metal_is_not_looked_at():
    header = "#ifdef __CUDACC__\nfloat* cuda(float& x);\n#endif\n#define PRODUCT(T, x) T(x) * x\n"
    source = "float x = PRODUCT(float, a[i]) * float(i) * 2;\no[i] = int(x) & 1 ? x : 0;"
    kernel_is_right(source, header=header)


def test_a_mistake_in_grammar_is_the_compilers():
    with pytest.raises(metal_host.CompileError, match="undeclared identifier 'oops'"):
        fault_of("o[i] = oops;")
