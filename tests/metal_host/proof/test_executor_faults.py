"""Each kind of mistake, planted: found, with the right threads, at the right line."""

import re

import mlx.core as mx
import pytest

import metal_host

HERE = "uint i = thread_position_in_grid.x; uint l = thread_position_in_threadgroup.x;\n"
TILE = "threadgroup float tile[64];\n"
WAIT = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"


def fault_of(source, *, group=64, header="", seeds=(0, 1, 2), **options):
    """The fault that each of these orders of threads finds; of the last one."""
    launch = {k: options.pop(k) for k in ("init_value",) if k in options}
    kernel = mx.fast.metal_kernel(
        name="wrong", input_names=["a"], output_names=["o"], source=HERE + source, header=header,
        **options,
    )  # fmt: skip

    def call(a):
        return kernel(
            inputs=[a],
            output_shapes=[(128,)],
            output_dtypes=[mx.float32],
            grid=(128, 1, 1),
            threadgroup=(group, 1, 1),
            **launch,
        )[0]

    for seed in seeds:
        with pytest.raises(metal_host.Fault) as caught:
            metal_host.run(call, mx.arange(128).astype(mx.float32), seed=seed)
    return caught.value


def check(fault, kind, text, **expected):
    """Kind, words of the message, and attributes."""
    assert fault.kind == kind
    assert text in str(fault)
    assert {name: getattr(fault, name) for name in expected} == expected


# Races


def test_a_barrier_is_missing():
    fault = fault_of(TILE + "tile[l] = a[i];\no[i] = l < 63 ? tile[l] : tile[5];")
    # Whoever comes first: an unwritten read, or one of a write that nothing orders.
    assert fault.kind in ("race", "uninitialised read")
    assert 63 in (fault.thread, fault.other_thread)


def test_a_write_after_a_read():
    source = "float x = tile[l ^ 1];\nif (l == 9) tile[l] = x;\no[i] = x;"
    source = TILE + "tile[l] = a[i];\n" + WAIT + source
    check(fault := fault_of(source), "race", "threadgroup array `tile`")
    assert {fault.thread, fault.other_thread} == {8, 9}
    assert "tile[l] = x" in fault.where + fault.other_where


def test_two_threads_write_one_element():
    check(fault := fault_of("o[i == 77 ? 3 : i] = 1;"), "race", "device buffer `o`")
    assert {(fault.threadgroup, fault.thread), (fault.other_threadgroup, fault.other_thread)} == {
        ((0, 0, 0), 3),
        ((1, 0, 0), 13),
    }
    assert "wrong_float_float.metal:7: o[i == 77 ? 3 : i] = 1;" in str(fault)


def test_a_barrier_does_not_order_the_other_kind_of_memory():
    source = "o[i] = 1;\nthreadgroup_barrier(mem_flags::{});\nif (l == 1) o[i - 1] = 2;"
    check(fault_of(source.format("mem_threadgroup")), "race", "device buffer `o`")
    kernel_is_right(source.format("mem_device"))


def test_a_simdgroup_barrier_orders_its_simdgroup_only():
    wait = "simdgroup_barrier(mem_flags::mem_threadgroup);\n"
    source = TILE + "tile[l] = a[i];\n" + wait + "o[i] = tile[l ^ {}];"
    kernel_is_right(source.format(1))
    assert fault_of(source.format(32)).kind in ("race", "uninitialised read")


def kernel_is_right(source, **options):
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        fault_of(source, **options)


def test_atomic_and_other_accesses_race():
    source = """
    atomic_fetch_add_explicit(&o[0], a[i], memory_order_relaxed);
    if (i == 40) ((device float*)o)[0] = 2;
    """
    fault = fault_of(source, atomic_outputs=True, init_value=0)
    check(fault, "race", "atomically")


# Bounds


@pytest.mark.parametrize(
    ("source", "text", "thread"),
    [
        ("o[i] = a[i + 1];", "byte 512 of the device buffer `a`", 63),
        ("o[i] = a[int(i) - 1];", "byte -4 of the device buffer `a`", 0),
        ("o[i] = 1; if (i == 70) o[128] = 1;", "byte 512 of the device buffer `o`", 6),
        ("if (i == 70) o[int(i) - 71] = 1;", "byte -4 of the device buffer `o`", 6),
        (TILE + "tile[l + 1] = 1;\no[i] = a[i];", "byte 256 of the threadgroup array `tile`", 63),
        (TILE + "if (l == 7) tile[6 - int(l)] = 1;", "byte -4 of the threadgroup array `tile`", 7),
        ("o[i] = *(const device float*)((const device char*)(a + i) + 2);", "byte 510", 63),
    ],
)  # fmt: skip
def test_bounds(source, text, thread):
    check(fault_of(source), "out of bounds", text, thread=thread)


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


# What was never written


def test_unwritten_threadgroup_memory():
    source = TILE + "if (l != 5) tile[l] = a[i];\n" + WAIT + "o[i] = tile[l];"
    fault = fault_of(source)
    check(fault, "uninitialised read", "byte 20 of the threadgroup array `tile`", thread=5)


def test_threadgroup_memory_does_not_outlive_its_threadgroup():
    source = TILE + "if (i < 64) tile[l] = 1;\n" + WAIT + "if (i >= 64) o[i] = tile[l];"
    check(fault_of(source), "uninitialised read", "`tile`", threadgroup=(1, 0, 0))


def test_unwritten_output():
    check(fault_of("if (i == 9) o[i] = o[i] + a[i];"), "uninitialised read", "`o`", thread=9)
    kernel_is_right("if (i == 9) o[i] = o[i] + a[i];", init_value=1)


def test_private_memory_starts_as_nan():
    kernel = mx.fast.metal_kernel(
        name="private", input_names=["a"], output_names=["o"],
        source="float x[4]; x[0] = a[0]; o[thread_position_in_grid.x] = x[1];",
    )  # fmt: skip
    launch = {"output_shapes": [(1,)], "output_dtypes": [mx.float32]}
    launch |= {"grid": (1, 1, 1), "threadgroup": (1, 1, 1)}
    (out,) = metal_host.execute(kernel, inputs=[mx.zeros(1)], **launch)
    assert mx.isnan(out).item()


# Threads that do not meet


def test_a_thread_returns_before_a_barrier():
    fault = fault_of("if (l == 3) return;\n" + WAIT + "o[i] = a[i];")
    check(fault, "divergent barrier", "has returned")
    assert 3 in (fault.thread, fault.other_thread)


def test_a_lane_returns_before_a_simdgroup_barrier():
    fault = fault_of("o[i] = a[i];\nif (l % 2) simdgroup_barrier(mem_flags::mem_threadgroup);")
    check(fault, "divergent barrier", "has returned")
    assert (fault.thread % 2) != (fault.other_thread % 2)


def test_simdgroups_at_different_barriers():
    source = "if (l < 32) " + WAIT + "else " + WAIT + "o[i] = a[i];"
    check(fault := fault_of(source), "divergent barrier", "threadgroup_barrier")
    assert (fault.thread < 32) != (fault.other_thread < 32)


@pytest.mark.parametrize(
    "source",
    [
        "o[i] = l % 32 < 16 ? simd_sum(a[i]) : simd_sum(1.0f);",
        "float x = 0;\nif (l % 32 < 16) x = simd_sum(a[i]);\n" + WAIT + "o[i] = x;",
        "if (l % 32 < 16) o[i] = simd_sum(a[i]);\nelse o[i] = simd_shuffle(a[i], 0);",
    ],
)
def test_lanes_in_different_operations(source):
    check(fault := fault_of(source), "divergent simdgroup operation", "simd_sum(a[i])")
    assert fault.thread // 32 == fault.other_thread // 32
    assert (fault.thread % 32 < 16) != (fault.other_thread % 32 < 16)


def test_lanes_that_have_returned_take_no_part():
    kernel_is_right("if (l % 32 >= 16) return;\no[i] = simd_sum(a[i]);")


def test_deadlock():
    source = "if (i == 5) while (atomic_load_explicit(&o[9], memory_order_relaxed) == 0) {}"
    fault = fault_of(source, atomic_outputs=True, init_value=0, seeds=(0,))
    check(fault, "deadlock", "while (atomic_load", thread=5, threadgroup=(0, 0, 0))


# What is known without a launch


def test_threadgroup_memory():
    source = "threadgroup float big[8000]; threadgroup half more[500];\nbig[l] = more[l] = a[i];"
    fault = fault_of(source, seeds=(0,))
    check(fault, "threadgroup memory", "33000 bytes of 32768 (big 32000, more 1000)")


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("template <typename T>\nfloat get(T* p) { return *p; }", "o[i] = get(a + i);"),
        ("float get(const float& x) { return x; }", "o[i] = get(a[i]);"),
        ("", "float x = a[i];\nfloat* p = &x;\no[i] = *p;"),
        ("", "thread const float* p = a;\no[i] = *p;"),
        ("", "o[i] = ((threadgroup const float*)a)[i];"),
        ("", TILE + "o[i] = ((device const float*)tile)[i];"),
        ("", TILE + "device float* p = tile;\no[i] = *p;"),
        ("struct S { float x; };\nfloat get(thread S* s, S& t) { return s->x; }", "o[i] = a[i];"),
    ],
)
def test_address_spaces(header, source):
    check(fault_of(source, header=header, seeds=(0,)), "address space", "wrong_float_float.metal:")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("((device float*)a)[i] = 1;", "byte .* of the device buffer `a`, which may only be read"),
        ("((constant int*)a_shape)[0] = 1;", "byte 0 of the constant buffer `a_shape`"),
    ],
)
def test_writes_to_what_may_only_be_read(source, text):
    fault = fault_of(source)
    assert fault.kind == "address space"
    assert re.search(text, str(fault))


def test_text_that_is_not_for_metal_is_not_looked_at():
    header = "#ifdef __CUDACC__\nfloat* cuda(float& x);\n#endif\n#define PRODUCT(T, x) T(x) * x\n"
    source = "float x = PRODUCT(float, a[i]) * float(i) * 2;\no[i] = int(x) & 1 ? x : 0;"
    kernel_is_right(source, header=header)


def test_a_mistake_in_grammar_is_the_compilers():
    with pytest.raises(metal_host.CompileError, match="undeclared identifier 'oops'"):
        fault_of("o[i] = oops;")
