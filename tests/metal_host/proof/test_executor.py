"""The executor on small kernels of mx.fast.metal_kernel: results, order, structs."""

import mlx.core as mx
import numpy as np
import pytest

import metal_host

HERE = """
uint i = thread_position_in_grid.x;
uint l = thread_position_in_threadgroup.x;
"""
SUM = """
threadgroup float partial[32];
float total = simd_sum(a[i]);
if (thread_index_in_simdgroup == 0) partial[simdgroup_index_in_threadgroup] = total;
threadgroup_barrier(mem_flags::mem_threadgroup);
if (simdgroup_index_in_threadgroup == 0) {
  total = thread_index_in_simdgroup < simdgroups_per_threadgroup ? partial[l] : 0.0f;
  total = simd_sum(total);
  if (l == 0) o[threadgroup_position_in_grid.x] = total;
}
"""
SCAN = """
threadgroup float sums[2][128];
sums[0][l] = a[i];
uint from = 0;
for (uint step = 1; step < 128; step *= 2) {
  threadgroup_barrier(mem_flags::mem_threadgroup);
  sums[1 - from][l] = sums[from][l] + (l >= step ? sums[from][l - step] : 0.0f);
  from = 1 - from;
}
o[i] = sums[from][l];
"""


def make(source, inputs=("a",), name="kernel", **options):
    return mx.fast.metal_kernel(
        name=name, input_names=list(inputs), output_names=["o"], source=HERE + source, **options
    )


def caller(kernel, count, group=32, shape=None, dtype=mx.float32, **options):
    """A function of arrays that calls the kernel on `count` threads."""

    def call(*arrays):
        return kernel(
            inputs=list(arrays),
            output_shapes=[shape or (count,)],
            output_dtypes=[dtype],
            grid=(count, 1, 1),
            threadgroup=(group, 1, 1),
            **options,
        )[0]

    return call


def numbers(*shape, seed=0):
    return mx.random.normal(shape, key=mx.random.key(seed))


# Results


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_elements(dtype):
    a, b = numbers(200).astype(dtype), numbers(200, seed=1).astype(dtype)
    kernel = make("o[i] = T(float(a[i]) + float(b[i]));", ("a", "b"))
    out, report = metal_host.run(caller(kernel, 200, dtype=dtype, template=[("T", dtype)]), a, b)
    assert out.dtype == dtype
    assert mx.array_equal(out, (a.astype(mx.float32) + b.astype(mx.float32)).astype(dtype))
    size = 200 * dtype.size
    assert report.device_read == {"a": size, "b": size, "o": 0}
    assert report.device_written["o"] == size
    assert report.unwritten["o"] == 0


def test_a_grid_that_threadgroups_do_not_divide():
    kernel = make("o[i] = threads_per_threadgroup.x * 100 + thread_index_in_simdgroup + a[0];")
    out, _ = metal_host.run(caller(kernel, 70, group=64), mx.zeros(9))
    assert np.array_equal(out, [6400 + i % 32 for i in range(64)] + [600 + i for i in range(6)])


def test_three_axes_of_a_grid():
    kernel = make(
        "uint3 p = thread_position_in_grid;\n"
        "o[(p.z * 3 + p.y) * 5 + p.x] = p.x + 10 * p.y + 100 * p.z + 0 * a[0];"
    )
    (out,) = metal_host.execute(
        kernel,
        inputs=[mx.zeros(8)],
        output_shapes=[(2, 3, 5)],
        output_dtypes=[mx.float32],
        grid=(5, 3, 2),
        threadgroup=(2, 2, 2),
    )
    x, y, z = np.arange(5), np.arange(3)[:, None], np.arange(2)[:, None, None]
    assert np.array_equal(out, x + 10 * y + 100 * z)


def test_small_inputs_are_constants_and_scalars_references():
    kernel = make("o[i] = a[i % 3] * s + a_shape[0] + a_ndim;", ("a", "s"))
    call = caller(kernel, 16)
    out, report = metal_host.run(lambda a: call(a, 2.0), mx.array([1.0, 2.0, 3.0]))
    assert np.array_equal(out, [[2, 4, 6][i % 3] + 3 + 1 for i in range(16)])
    assert report.device_read["a"] == report.device_read["s"] == 64


@pytest.mark.parametrize("row_contiguous", [True, False])
def test_strides(row_contiguous):
    a = numbers(6, 10)[::2, 1::3].T
    source = "o[i] = a[i / a_shape[1] * a_strides[0] + i % a_shape[1] * a_strides[1]];"
    kernel = make(source, ensure_row_contiguous=row_contiguous)
    out, _ = metal_host.run(caller(kernel, 9, shape=(3, 3)), a)
    assert mx.array_equal(out, a)


def test_bytes_between_the_elements_of_a_slice_are_out_of_bounds():
    kernel = make("o[i] = a[i];", ensure_row_contiguous=False)
    with pytest.raises(metal_host.Fault, match="out of bounds.*byte .* of the device buffer `a`"):
        metal_host.run(caller(kernel, 9), numbers(18)[::2])


def test_sum_of_a_threadgroup():
    a = numbers(512)
    kernel = make(SUM)
    out, report = metal_host.run(caller(kernel, 512, group=256, shape=(2,)), a)
    assert np.allclose(out, np.array(a).reshape(2, 256).sum(1), atol=1e-4)
    assert report.barriers == 2
    assert report.simd_operations == 2 * 8 + 2
    assert report.threadgroup_memory == 128
    assert (report.threadgroup_written, report.threadgroup_read) == (2 * 8 * 4, 2 * 8 * 4)


def test_prefix_sums():
    a = mx.arange(256).astype(mx.float32)
    out, report = metal_host.run(caller(make(SCAN), 256, group=128), a)
    assert np.array_equal(out, np.cumsum(np.array(a).reshape(2, 128), axis=1).reshape(-1))
    assert report.barriers == 2 * 7


def test_atomics_and_init_value():
    source = "atomic_fetch_add_explicit(&o[i % 2], a[i], memory_order_relaxed);"
    kernel = make(source, atomic_outputs=True)
    out, _ = metal_host.run(
        caller(kernel, 64, shape=(3,), init_value=5), mx.arange(64).astype(mx.float32)
    )
    assert out.tolist() == [5 + 31 * 32, 5 + 32 * 32, 5]


def test_a_thread_may_wait_for_another_of_its_threadgroup():
    source = """
    if (l == 0) while (atomic_load_explicit(&o[0], memory_order_relaxed) == 0) {}
    if (l == 1) atomic_store_explicit(&o[0], 1, memory_order_relaxed);
    """
    kernel = make(source, (), atomic_outputs=True)
    out, _ = metal_host.run(caller(kernel, 32, shape=(1,), init_value=0))
    assert out.tolist() == [1]


def test_a_chain_of_kernels():
    double = make("o[i] = 2 * a[i];", name="twice")
    increment = make("o[i] = a[i] + 1;", name="more")
    a = numbers(32)
    out, report = metal_host.run(lambda a: caller(increment, 32)(caller(double, 32)(a)), a)
    assert mx.array_equal(out, 2 * a + 1)
    names = [launch.kernel for launch in report.launches]
    assert names == ["twice_float_float", "more_float_float"]
    assert report.device_read["a"] == 2 * 128


def test_what_one_kernel_leaves_unwritten_the_next_may_not_read():
    half, copy = make("if (i < 16) o[i] = a[i];"), make("o[i] = a[i];")
    with pytest.raises(metal_host.Fault, match="uninitialised read.*device buffer `a`"):
        metal_host.run(lambda a: caller(copy, 32)(caller(half, 32)(a)), numbers(32))


def test_only_custom_kernels_run():
    with pytest.raises(ValueError, match="not Add"):
        metal_host.run(lambda a: a + a, numbers(8))


def test_execute_and_recording():
    kernel = make("o[i] = a[i] * T(3);")
    call = {"output_shapes": [(8,)], "output_dtypes": [mx.float32], "grid": (8, 1, 1)}
    call |= {"threadgroup": (8, 1, 1), "template": [("T", mx.float32)]}
    with metal_host.recording() as reports:
        (out,) = metal_host.execute(kernel, inputs=[mx.ones(8)], **call)
        metal_host.execute(kernel, inputs=[out], **call)
    assert out.tolist() == [3] * 8
    assert [report.device_written["o"] for report in reports] == [32, 32]


def test_constructors_of_vectors():
    source = """
    float2 pair(a[i], 1);
    float4 four = float4(pair, float2(2));
    o[i] = four.x + four.y * 10 + four.w * 100;
    """
    a = numbers(8)
    assert mx.allclose(metal_host.run(caller(make(source), 8), a)[0], a + 210)


# Order


WORK = """
threadgroup float tile[64];
tile[l] = a[i] * a[i] + 1.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);
float x = metal::fma(tile[63 - l], 2.0f, tile[l]);
for (int j = 0; j < 3; j++) x += tile[(l + j) % 64] * a[i];
o[i] = metal::exp(x) + metal::sqrt(x * x) + simd_max(x) / 3.0f;
"""


@pytest.mark.parametrize("source", [SUM, SCAN, WORK], ids=["sum", "scan", "work"])
def test_right_kernels_do_not_depend_on_the_order_of_threads(source):
    a = numbers(256)
    group = 64 if source is WORK else 128
    call = caller(make(source), 256, group=group, shape=(2,) if source is SUM else None)
    first, _ = metal_host.run(call, a)
    for seed in range(1, 8):
        again, _ = metal_host.run(call, a, seed=seed)
        assert mx.array_equal(again, first)
    fast, report = metal_host.run(call, a, trace=False)
    assert mx.array_equal(fast, first)
    assert not report.traced


def test_seeds_change_the_order():
    source = """
    int place = atomic_fetch_add_explicit(&o[64], 1, memory_order_relaxed);
    atomic_store_explicit(&o[place], int(i), memory_order_relaxed);
    """
    kernel = make(source, (), atomic_outputs=True)
    call = caller(kernel, 64, shape=(65,), dtype=mx.int32, init_value=0)
    orders = {tuple(metal_host.run(call, seed=seed)[0].tolist()[:64]) for seed in range(4)}
    assert len(orders) == 4
    assert all(sorted(order) == list(range(64)) for order in orders)


def test_structs_in_threadgroup_memory():
    header = """
    struct Pair {
      float m, l;
      Pair() = default;
      Pair(float m, float l) : m(m), l(l) {}
      float sum() const { return m + l; }
    };
    """
    source = """
    threadgroup Pair pairs[32];
    pairs[l] = Pair(a[i], 1);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Pair mine = pairs[31 - l];
    o[i] = mine.m + pairs[l].sum();
    """
    a = numbers(32)
    out, report = metal_host.run(caller(make(source, header=header), 32), a)
    assert np.allclose(out, np.array(a)[::-1] + np.array(a) + 1)
    assert (report.threadgroup_written, report.threadgroup_read) == (32 * 8, 32 * 16)


def test_a_component_of_a_vector_is_touched_alone():
    source = """
    threadgroup float4 rows[8];
    rows[l / 4][l % 4] = a[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    o[i] = rows[l / 4].y;
    """
    a = numbers(32)
    out, report = metal_host.run(caller(make(source), 32), a)
    assert mx.array_equal(out, mx.repeat(a[1::4], 4))
    assert (report.threadgroup_written, report.threadgroup_read) == (32 * 4, 32 * 4)
