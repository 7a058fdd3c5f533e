"""The stand-in for Metal's system headers, run as kernels and compared with numpy."""

import math

import mlx.core as mx
import numpy as np
import pytest

from metal_host.proof.header_kernels import FLOATS, evaluate, evaluate_all, rounded

# Numbers

# float bits -> bfloat bits: ties to even both ways, below and above a tie, the largest float, which
# becomes infinity, denormals, signs, infinities, not-a-number.
BFLOATS = {
    0x3F800000: 0x3F80,
    0x3F808000: 0x3F80,
    0x3F818000: 0x3F82,
    0x3F807FFF: 0x3F80,
    0x3F808001: 0x3F81,
    0x7F7FFFFF: 0x7F80,
    0xFF7FFFFF: 0xFF80,
    0x7F7F7FFF: 0x7F7F,
    0x00000001: 0x0000,
    0x00008000: 0x0000,
    0x00018000: 0x0002,
    0x80008001: 0x8001,
    0x007FFFFF: 0x0080,
    0x80000000: 0x8000,
    0x7F800000: 0x7F80,
    0xFF800000: 0xFF80,
    0x7FC00000: 0x7FC0,
}


def test_bfloat_rounds_to_nearest_even():
    source = "out[i] = as_type<ushort>(bfloat(as_type<float>(a[i])));"
    result, _ = evaluate(source, np.array(list(BFLOATS), np.uint32), out=mx.uint16)
    assert [hex(x) for x in result] == [hex(x) for x in BFLOATS.values()]


def test_bfloat_is_widened_exactly():
    bits = np.arange(65536, dtype=np.uint16)
    source = "out[i] = as_type<uint>(float(as_type<bfloat>(a[i])));"
    result, _ = evaluate(source, bits, out=mx.uint32)
    assert np.array_equal(result, bits.astype(np.uint32) << 16)


def test_half_rounds_to_nearest_even():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 4096, dtype=np.uint32)
    values = np.concatenate([bits.view(np.float32), np.float32([65519.9, 65520, 2**-25, 6e-8])])
    values = values[~np.isnan(values)]
    source = "out[i] = as_type<ushort>(half(a[i]));"
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16).view(np.uint16)
    assert np.array_equal(evaluate(source, values, out=mx.uint16)[0], expected)


@pytest.mark.parametrize("kind", FLOATS)
def test_every_operation_rounds(kind):
    rng = np.random.default_rng(1)
    a = rounded(rng.normal(size=512), kind)
    b = rounded(rng.uniform(0.5, 2, size=512), kind)
    operations = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}
    results, _ = evaluate_all(
        [f"float((x {operator} y) {operator} y)" for operator in operations],
        a, b, setup="T x = T(a[i]), y = T(b[i]);", T=FLOATS[kind],
    )  # fmt: skip
    for operation, result in zip(operations.values(), results, strict=True):
        expected = rounded(operation(rounded(operation(a, b), kind), b), kind)
        assert np.array_equal(result, expected), operation


def test_literals_are_float_and_half():
    source = "out[i] = 10 * sizeof(1.0 / 3.0) + sizeof(1.0h) + (a[i] + 0.1 == a[i] + 0.1f);"
    assert evaluate(source, np.float32([0.7]))[0] == 43


def test_half_and_bfloat_convert_to_each_other():
    source = (
        "out[i] = metal::convert<half>(bfloat(a[i])) + float(metal::convert<bfloat>(half(a[i])));"
    )
    assert evaluate(source, np.float32([1.75]))[0] == 3.5


@pytest.mark.parametrize("kind", FLOATS)
def test_limits_of_floating_point(kind):
    names = ["infinity", "max", "lowest", "min", "denorm_min", "epsilon", "quiet_NaN"]
    lines = [f"out[{n}] = float(metal::numeric_limits<T>::{f}());" for n, f in enumerate(names)]
    result, _ = evaluate("\n".join(lines), np.float32([0]), count=7, threads=1, T=FLOATS[kind])
    info = {"float": (23, 127), "half": (10, 15), "bfloat": (7, 127)}
    bits, exponent = info[kind]
    largest = (2 - 2.0**-bits) * 2.0**exponent
    least = 2.0 ** (1 - exponent)
    expected = [math.inf, largest, -largest, least, least * 2.0**-bits, 2.0**-bits, math.nan]
    assert np.array_equal(result, np.float32(expected), equal_nan=True)


def test_limits_of_integers():
    names = {"char": 8, "short": 16, "int": 32, "long": 64}
    names |= {f"u{name}": bits for name, bits in names.items()}
    limits = [
        f"long(metal::numeric_limits<{name}>::{f}())" for name in names for f in ("min", "max")
    ]
    results, _ = evaluate_all(limits, np.int32([0]), out=mx.int64)
    expected = []
    for name, bits in names.items():
        info = np.iinfo(f"{'u' * name.startswith('u')}int{bits}")
        expected += [info.min, np.array(info.max).astype(np.int64)]
    assert results.ravel().tolist() == expected


def test_sizes_and_alignments():
    sizes = {
        "float2": 8, "float3": 16, "float4": 16, "half3": 8, "bool4": 4, "uchar3": 4, "long4": 32,
        "packed_float3": 12, "packed_half3": 6, "bfloat2": 4, "size_t": 8, "atomic_uint": 4,
    }  # fmt: skip
    lines = [f"out[{n}] = sizeof({t});" for n, t in enumerate(sizes)]
    lines += ["out[12] = alignof(float3);", "out[13] = alignof(packed_float3);"]
    header = "#include <metal_stdlib>\nusing namespace metal;\n"
    result, _ = evaluate(
        "\n".join(lines), np.int32([0]), out=mx.int32, count=14, threads=1, header=header
    )
    assert result.tolist() == [*sizes.values(), 16, 4]


# Functions

# Metal's name -> numpy's, over which arguments, and the error allowed in units in the last place.
FUNCTIONS = {
    "exp": (np.exp, -87, 88, 1), "exp2": (np.exp2, -126, 127, 1), "log": (np.log, 1e-30, 1e30, 1),
    "exp10": (lambda x: 10.0**x, -37, 38, 1), "log2": (np.log2, 1e-30, 1e30, 1),
    "log10": (np.log10, 1e-30, 1e30, 1.5), "sqrt": (np.sqrt, 0, 1e30, 0.5),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1e-30, 1e30, 0.5), "sin": (np.sin, -30, 30, 1),
    "cos": (np.cos, -30, 30, 1), "tan": (np.tan, -1.5, 1.5, 1), "asin": (np.arcsin, -1, 1, 1),
    "acos": (np.arccos, -1, 1, 1), "atan": (np.arctan, -9, 9, 1), "sinh": (np.sinh, -80, 80, 1.5),
    "cosh": (np.cosh, -80, 80, 1.5), "tanh": (np.tanh, -9, 9, 2), "asinh": (np.arcsinh, -9, 9, 2),
    "acosh": (np.arccosh, 1, 99, 2), "atanh": (np.arctanh, -0.99, 0.99, 2),
    "sinpi": (lambda x: np.sin(np.pi * x), -1, 1, 1),
    "cospi": (lambda x: np.cos(np.pi * x), -1, 1, 1),
}  # fmt: skip


def arguments(name, kind):
    _, low, high, _ = FUNCTIONS[name]
    if kind == "half":
        low, high = (1e-4, 6e4) if high >= 1e30 else (max(low, -9), min(high, 9))
    if low < 0:
        return rounded(np.random.default_rng(2).uniform(low, high, 256), kind)
    return rounded(np.geomspace(low or 1e-9, high, 256), kind)


@pytest.mark.parametrize("kind", ["float", "half"])
def test_special_functions(kind):
    x = np.stack([arguments(name, kind) for name in FUNCTIONS])
    lines = [
        f"out[{256 * n} + i] = float(metal::{name}(T(a[{256 * n} + i])));"
        for n, name in enumerate(FUNCTIONS)
    ]
    results, report = evaluate("\n".join(lines), x, count=x.size, threads=256, T=FLOATS[kind])
    assert report.special_functions == x.size
    dtype = np.float32 if kind == "float" else np.float16
    for name, row, result in zip(FUNCTIONS, x, results.reshape(x.shape), strict=True):
        exact, _, _, allowed = FUNCTIONS[name]
        expected = exact(row.astype(np.float64))
        with np.errstate(over="ignore", invalid="ignore"):
            unit = np.spacing(np.abs(expected).astype(dtype)).astype(np.float64)
            error = np.nanmax(np.abs(result - expected) / unit)
        assert error <= (allowed + 0.01 if kind == "float" else 0.51), name


def test_special_values():
    source = """
      float values[] = {INFINITY, -INFINITY, 0.0f, -0.0f, NAN};
      float x = values[i % 5];
      out[i] = i < 5 ? metal::exp(x) : i < 10 ? metal::log(x) : metal::rsqrt(x);"""
    result, _ = evaluate(source, np.float32([0]), count=15, threads=15)
    inf, nan = math.inf, math.nan
    expected = [inf, 0, 1, 1, nan, inf, nan, -inf, -inf, nan, 0, nan, inf, -inf, nan]
    assert np.array_equal(result, np.float32(expected), equal_nan=True)


def test_rounding_functions():
    x = np.float32([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 2.49, -7.9, 1e9])
    expected = {
        "rint": np.rint(x), "floor": np.floor(x), "ceil": np.ceil(x), "trunc": np.trunc(x),
        "round": np.trunc(x + np.copysign(0.5, x)), "abs": np.abs(x), "fract": x - np.floor(x),
        "sign": np.sign(x), "saturate": np.clip(x, 0, 1),
    }  # fmt: skip
    results, _ = evaluate_all([f"metal::{name}(a[i])" for name in expected], x)
    for name, result in zip(expected, results, strict=True):
        assert np.array_equal(result, expected[name]), name


def test_fma_rounds_once_and_counts():
    a = np.float32([1 + 2**-23, 3])
    result, report = evaluate("out[i] = metal::fma(a[i], a[i], -1.0f - 0x1p-22f);", a)
    assert result[0] == 2.0**-46
    assert report.multiply_accumulates == 2


def test_half_fma_rounds_once():
    """Exact in double for these exponents; rounding to float between would go wrong for some."""
    rng = np.random.default_rng(6)
    a, b = (rng.uniform(0.5, 2, 4096).astype(np.float16).astype(np.float32) for _ in range(2))
    c = np.exp2(rng.integers(-14, 0, 4096)).astype(np.float32) * rng.choice([-1, 1], 4096)
    a[:2], b[:2], c[:2] = 1 + 2**-10, 1 + 2**-10, [-1, 2**-21]
    source = "out[i] = metal::fma(half(a[i]), half(b[i]), half(c[i]));"
    result, _ = evaluate(source, a, b, np.float32(c))
    exact = a.astype(np.float64) * b + c
    assert np.array_equal(result, exact.astype(np.float16).astype(np.float32))


def test_minima_ignore_nan():
    a, b = np.float32([1, np.nan, 2, np.nan]), np.float32([2, 1, np.nan, np.nan])
    results, _ = evaluate_all(["metal::min(a[i], b[i])", "metal::max(a[i], b[i])"], a, b)
    assert np.array_equal(results, [np.fmin(a, b), np.fmax(a, b)], equal_nan=True)


@pytest.mark.parametrize("kind", FLOATS)
def test_classification(kind):
    x = np.float32([0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-45])
    source = """
      T x = T(a[i]);
      out[i] = metal::isnan(x) + 2 * metal::isinf(x);
      out[i] += 4 * metal::isfinite(x) + 8 * metal::signbit(x);"""
    expected = np.isnan(x) + 2 * np.isinf(x) + 4 * np.isfinite(x) + 8 * np.signbit(x)
    assert np.array_equal(evaluate(source, x, T=FLOATS[kind])[0][:6], expected[:6])


def test_integer_functions():
    a = np.random.default_rng(3).integers(1, 2**32, 64, dtype=np.uint32)
    b = a[::-1].copy()
    wide = [(int(x), int(y)) for x, y in zip(a, b, strict=True)]
    mask = 2**32 - 1
    expected = {
        "clz(x)": [32 - x.bit_length() for x, _ in wide],
        "ctz(x)": [(x & -x).bit_length() - 1 for x, _ in wide],
        "popcount(x)": [x.bit_count() for x, _ in wide],
        "mulhi(x, y)": [x * y >> 32 for x, y in wide],
        "absdiff(x, y)": [abs(x - y) for x, y in wide],
        "addsat(x, y)": [min(x + y, mask) for x, y in wide],
        "subsat(x, y)": [max(x - y, 0) for x, y in wide],
        "hadd(x, y)": [x + y >> 1 for x, y in wide],
        "rhadd(x, y)": [x + y + 1 >> 1 for x, y in wide],
        "rotate(x, 5u)": [(x << 5 | x >> 27) & mask for x, _ in wide],
        "reverse_bits(x)": [int(f"{x:032b}"[::-1], 2) for x, _ in wide],
        "extract_bits(x, 7u, 9u)": [x >> 7 & 511 for x, _ in wide],
        "insert_bits(x, y, 7u, 9u)": [x & ~(511 << 7) | (y & 511) << 7 for x, y in wide],
        "clamp(x, 9u, 1u << 30)": [min(max(x, 9), 1 << 30) for x, _ in wide],
    }
    expressions = [f"metal::{expression}" for expression in expected]
    setup = "uint x = a[i], y = b[i];"
    results, _ = evaluate_all(expressions, a, b, setup=setup, out=mx.uint32)
    for expression, result in zip(expected, results, strict=True):
        assert result.tolist() == expected[expression], expression
