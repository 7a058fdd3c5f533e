"""The work that a report tells equals closed formulas, at every level of optimisation and seed."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from metal_host import Library, Output, Report

THREADS, GROUPS = 64, 3
ALL = THREADS * GROUPS
SIMDGROUPS = ALL // 32
TYPES = {"float": np.float32, "half": np.float16}


@dataclass(frozen=True)
class Counted:
    """A kernel's body, from x to y, and what its report is to tell (of the whole launch)."""

    body: str
    expected: dict[str, int | dict[str, int]]
    header: str = ""
    type_: str = "float"
    elements: int = 16 * ALL  # of x and of y
    filled: bool = False  # y, before the launch
    constants: dict[str, int] = field(default_factory=dict)

    def launch(self, optimise: int, seed: int) -> tuple[np.ndarray, Report]:
        text = f"""{self.header}
[[kernel]] void counted(
    device const {self.type_}* x [[buffer(0)]],
    device {self.type_}* y [[buffer(1)]],
    constant const uint* sizes [[buffer(2)]],
    uint i [[thread_position_in_grid]],
    uint t [[thread_index_in_threadgroup]],
    uint g [[threadgroup_position_in_grid]],
    uint simd [[simdgroup_index_in_threadgroup]]) {{
{self.body}
}}
"""
        x = np.random.default_rng(0).uniform(0.5, 1, self.elements).astype(TYPES[self.type_])
        y = np.zeros_like(x)
        sizes = np.array([5, 3], np.uint32)
        library = Library(text, {"it": "counted"}, optimise=optimise)
        buffers = [x, y if self.filled else Output(y), sizes]
        report = library.launch("it", buffers, (GROUPS, 1, 1), (THREADS, 1, 1), seed)
        return y, report


def counts(report: Report, names) -> dict[str, int | dict[str, int]]:
    found = {name: getattr(report, name) for name in names}
    return {name: dict(v) if isinstance(v, dict) else v for name, v in found.items()}


def bytes_of(x: int = 0, y: int = 0, sizes: int = 0) -> dict[str, int]:
    return {"x": x, "y": y, "sizes": sizes}


def _multiply(type_: str) -> Counted:
    """Every way to write a product that is added; `steps` of the loop are known at run time."""
    size, steps = np.dtype(TYPES[type_]).itemsize, 5
    return Counted(
        f"""
    typedef {type_} T;
    T a = x[i], b = x[i + 1], sum = 0;
    for (uint n = 0; n < sizes[0]; ++n) {{
      sum += a * b;            // 1
      sum = fma(a, b, sum);    // 1
      sum = a * b + sum;       // 1
      sum = sum - a * b;       // 1
      T product = a * b;
      sum = product + sum;     // two statements: none
      sum = (sum + a) * b;     // a product of a sum: none
    }}
    y[i] = sum;""",
        {
            "multiply_accumulates": 4 * steps * ALL,
            "special_functions": 0,
            "device_read": bytes_of(x=2 * size * ALL, sizes=4 * (steps + 1) * ALL),
            "device_written": bytes_of(y=size * ALL),
        },
        type_=type_,
    )


def _matrices(type_: str) -> Counted:
    """Each simdgroup multiplies 8x8 tiles from threadgroup memory, loaded once per threadgroup."""
    size = np.dtype(TYPES[type_]).itemsize
    return Counted(
        f"""
    threadgroup {type_} tiles[2][64];
    for (uint n = 0; n < sizes[0]; ++n) {{
      threadgroup_barrier(mem_flags::mem_threadgroup);
      tiles[0][t] = x[i + n];
      tiles[1][t] = x[i + n + 1];
      threadgroup_barrier(mem_flags::mem_threadgroup);
      simdgroup_matrix<{type_}, 8, 8> a, b;
      simdgroup_matrix<float, 8, 8> c = make_filled_simdgroup_matrix<float, 8>(0.0f);
      simdgroup_load(a, tiles[0], 8);
      simdgroup_load(b, tiles[1], 8);
      for (uint m = 0; m < sizes[1]; ++m) simdgroup_multiply_accumulate(c, a, b, c);
      simdgroup_matrix<{type_}, 8, 8> out;
      simdgroup_multiply(out, a, b);
      if (n == 4) simdgroup_store(out, y + 64 * (2 * g + simd), 8);
    }}""",
        {
            "multiply_accumulates": 512 * 5 * (3 + 1) * SIMDGROUPS,
            "barriers": 2 * 5 * GROUPS,
            "threadgroup_memory": 128 * size,
            "threadgroup_written": 5 * 2 * size * ALL,
            "threadgroup_read": 5 * 2 * 64 * size * SIMDGROUPS,
            "device_written": bytes_of(y=64 * size * SIMDGROUPS),
        },
        type_=type_,
    )


_FUNCTIONS = "exp exp2 log log2 sqrt rsqrt sin cos tanh".split()
COUNTED = {
    "products of float": _multiply("float"),
    "products of half": _multiply("half"),
    "matrices of float": _matrices("float"),
    "matrices of half": _matrices("half"),
    "products of vectors": Counted(
        """
    float4 a = ((device const float4*)x)[i], sum = 0;
    for (uint n = 0; n < sizes[0]; ++n) sum += a * a;
    ((device float4*)y)[i] = fma(a, sum, a) + dot(a, sum);""",
        {
            "multiply_accumulates": (4 * 5 + 4 + 4) * ALL,
            "device_read": bytes_of(x=16 * ALL, sizes=4 * 6 * ALL),
            "device_written": bytes_of(y=16 * ALL),
        },
    ),
    "special functions": Counted(
        "    float a = x[i];\n    y[i] = pow(a, a) + a / x[i + 1]"
        + "".join(f" + {name}(a) + fast::{name}(a) + precise::{name}(a)" for name in _FUNCTIONS)
        + " + exp(float4(a)).x + fabs(a) + floor(a) + max(a, 1.0f);",
        {"special_functions": (1 + 3 * len(_FUNCTIONS) + 4) * ALL, "multiply_accumulates": 0},
    ),
    "kinds of loads": Counted(
        """
    uint4 four = ((device const uint4*)x)[i];
    packed_float3 three = ((device const packed_float3*)x)[i];
    half2 two = ((device const half2*)x)[i];
    uchar one = ((device const uchar*)x)[i];
    ((device packed_float3*)y)[i] = three;
    ((device half2*)y)[1024 + i] = two;
    y[2048 + i] = four.x + four.w + one;""",
        {
            "device_read": bytes_of(x=(16 + 12 + 4 + 1) * ALL),
            "device_written": bytes_of(y=(12 + 4 + 4) * ALL),
        },
    ),
    "copies of structs": Counted(
        """
    threadgroup Pair pairs[64];
    pairs[t] = ((device const Pair*)x)[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Pair mine = pairs[63 - t];
    mine.scale += 1;
    ((device Pair*)y)[i] = mine;
    y[2048 + i] = pairs[t].scale;""",
        {
            "device_read": bytes_of(x=12 * ALL),
            "device_written": bytes_of(y=(12 + 4) * ALL),
            "threadgroup_written": 12 * ALL,
            "threadgroup_read": (12 + 4) * ALL,
            "threadgroup_memory": 12 * 64,
            "barriers": GROUPS,
        },
        header="struct Pair { uint first, second; float scale; };",
    ),
    "atomics": Counted(
        """
    threadgroup atomic_uint most;
    if (t == 0) atomic_store_explicit(&most, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    atomic_fetch_max_explicit(&most, i, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    uint largest = atomic_load_explicit(&most, memory_order_relaxed);
    atomic_fetch_add_explicit((device atomic_uint*)y, largest, memory_order_relaxed);""",
        {
            "device_read": bytes_of(y=4 * ALL),
            "device_written": bytes_of(y=4 * ALL),
            "threadgroup_written": 4 * (ALL + GROUPS),
            "threadgroup_read": 4 * 2 * ALL,
            "threadgroup_memory": 4,
            "barriers": 2 * GROUPS,
        },
        filled=True,
    ),
    "operations of a simdgroup": Counted(
        """
    float sum = simd_sum(x[i]);
    for (uint n = 0; n < sizes[1]; ++n) sum += simd_shuffle_xor(sum, 1);
    simdgroup_barrier(mem_flags::mem_none);
    y[i] = sum;""",
        {"simd_operations": (1 + 3) * SIMDGROUPS, "barriers": 0, "multiply_accumulates": 0},
    ),
}


@pytest.mark.parametrize("optimise", [0, 1, 2])
@pytest.mark.parametrize("name", COUNTED)
def test_counts(name, optimise):
    one = COUNTED[name]
    first, report = one.launch(optimise, seed=0)
    found = counts(report, one.expected)
    expected = {
        key: {n: v for n, v in value.items() if n in found[key]}
        if isinstance(value, dict)
        else value
        for key, value in one.expected.items()
    }
    assert found == expected
    for seed in range(1, 4):
        y, again = one.launch(optimise, seed)
        assert replace(again) == report
        assert y.tobytes() == first.tobytes()


def test_levels_of_optimisation_give_the_same_bits():
    for name in ("products of float", "products of half", "products of vectors"):
        results = {COUNTED[name].launch(optimise, 0)[0].tobytes() for optimise in (0, 1, 2)}
        assert len(results) == 1, name
