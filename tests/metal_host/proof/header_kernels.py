"""Short kernels for the tests of the headers, and numpy's rounding to Metal's types."""

import mlx.core as mx
import numpy as np

import metal_host

FLOATS = {"float": mx.float32, "half": mx.float16, "bfloat": mx.bfloat16}


def evaluate(source, *inputs, out=mx.float32, count=None, header="", threads=None, **template):
    """What `source` writes to `out`, from inputs a, b, c; and the report. Thread `i` of `count`."""
    arrays = [mx.array(x) for x in inputs]
    count = count or arrays[0].size
    threads = threads or count
    kernel = mx.fast.metal_kernel(
        name="header_test",
        input_names=["a", "b", "c"][: len(arrays)],
        output_names=["out"],
        header=header,
        source=f"uint i = thread_position_in_grid.x;\n{source}",
    )

    def call(*arrays):
        return kernel(
            inputs=list(arrays),
            output_shapes=[(count,)],
            output_dtypes=[out],
            grid=(threads, 1, 1),
            threadgroup=(min(threads, 1024), 1, 1),
            template=list(template.items()) or None,
        )[0]

    result, report = metal_host.run(call, *arrays)
    return np.array(result.astype(mx.float32) if result.dtype == mx.bfloat16 else result), report


def evaluate_all(expressions, *inputs, setup="", **options):
    """One kernel for many expressions: what each gives for every thread, and the report."""
    threads = mx.array(inputs[0]).size
    lines = [f"out[{n * threads} + i] = {e};" for n, e in enumerate(expressions)]
    source = "\n".join([setup, *lines])
    count = len(expressions) * threads
    result, report = evaluate(source, *inputs, count=count, threads=threads, **options)
    return result.reshape(len(expressions), threads), report


def bfloat_bits(values):
    """Round to nearest, ties to even, in integers."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16)


def to_bfloat(values):
    """Rounded to bfloat, as float32."""
    return (bfloat_bits(values).astype(np.uint32) << 16).view(np.float32)


def rounded(values, kind):
    """Rounded to a type of FLOATS, as float32."""
    values = np.asarray(values, np.float32)
    return {
        "float": lambda: values,
        "half": lambda: values.astype(np.float16).astype(np.float32),
        "bfloat": lambda: to_bfloat(values),
    }[kind]()
