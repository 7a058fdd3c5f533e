"""Address spaces mistaken, and writing what is constant, planted into a right kernel."""

import mlx.core as mx
import numpy as np
import pytest

import metal_host
from metal_host import Fault
from metal_host.proof.planted import Example, kernel, numbers
from metal_host.translation.toolchain import CompileError

_X = numbers(64)
SPACES = Example(
    kernel(
        """
    threadgroup float shared[64];
    shared[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    Window window = {shared, x};
    float own = 2;
    scale(own, factor);
    threadgroup const float* from = shared + 63;
    y[i] = own * last(from, t) + window.sum(t);""",
        more="\n    constant float& factor [[buffer(2)]],",
        header="""
struct Window {
  threadgroup const float* near;
  device const float* far;
  float sum(uint n) thread const { return near[n] - far[n]; }
};
inline float last(threadgroup const float* end, uint n) { return *(end - n); }
inline void scale(thread float& value, constant float& factor) { value *= factor; }""",
    ),
    _X,
    6 * _X[::-1],
    more=[np.float32(3).tobytes()],
)
CHANGES = {
    "device taken for threadgroup": ("from = shared + 63", "from = x + 63"),
    "threadgroup taken for device": ("{shared, x}", "{shared, shared}"),
    "constant taken for device": ("last(from, t)", "last(&factor, t)"),
    "cast to threadgroup": ("from = shared + 63", "from = (threadgroup const float*)x + 63"),
    "cast to device": ("{shared, x}", "{shared, (device const float*)shared}"),
    "reinterpreted": ("{shared, x}", "{shared, reinterpret_cast<device const float*>(shared)}"),
    "cast to a thread's own": ("own * last", "*(thread float*)(shared + t) * last"),
    "a reference to another space": ("scale(own, factor)", "scale(shared[t], factor)"),
    "no space": ("threadgroup const float* from", "const float* from"),
    "no space, in a helper": ("threadgroup const float* end", "const float* end"),
    "no space, a helper's reference": ("thread float& value", "float& value"),
    "no space, in a struct": ("device const float* far", "const float* far"),
    "no space, in a cast": ("from = shared + 63", "from = (float*)shared + 63"),
    "no space, on a thread's own": (
        "float own = 2;",
        "float own = 2; float* mine = &own; *mine = 2;",
    ),
    "constant written": ("float own = 2;", "factor = 3; float own = 2;"),
    "constant written in a helper": ("value *= factor;", "value *= factor; factor = 3;"),
    "const input written": ("float own = 2;", "x[i] = 3; float own = 2;"),
    "const member written": ("return near[n]", "far[n] = 0; return near[n]"),
}


def test_the_right_kernel():
    SPACES.is_right()


@pytest.mark.parametrize("name", CHANGES)
def test_address_spaces(name):
    """Told as a fault, or refused by the compiler, which names the line too."""
    change = CHANGES[name]
    with pytest.raises((Fault, CompileError)) as caught:
        SPACES.launch(change)
    text = SPACES.changed(change).split("\n")
    numbers = [n + 1 for n, line in enumerate(text) if change[1].split("\n")[-1] in line]
    assert f"library.metal:{numbers[0]}" in str(caught.value)
    assert isinstance(caught.value, CompileError) or caught.value.kind == "address space"


def test_the_thread_that_writes_constants_is_told():
    found = SPACES.fault(
        CHANGES["constant written in a helper"], kind="address space", at="factor = 3"
    )
    assert found.thread < 64


@pytest.mark.parametrize("n", [4, 64])
@pytest.mark.parametrize("change", ["a[i] = 1;", "((device float*)a)[i] = 1;"])
def test_a_store_to_an_input(n, change):
    """Of few elements it is in the constant space, of more in the device's."""
    kernel = mx.fast.metal_kernel(
        name="input_written",
        input_names=["a"],
        output_names=["out"],
        source=f"uint i = thread_position_in_grid.x; out[i] = a[i];\n{change}",
    )

    def call(a):
        given = {"output_shapes": [a.shape], "output_dtypes": [a.dtype], "grid": (n, 1, 1)}
        return kernel(inputs=[a], threadgroup=(n, 1, 1), **given)[0]

    with pytest.raises((Fault, CompileError)) as caught:
        metal_host.run(call, mx.random.normal((n,)))
    assert change.rstrip(";") in str(caught.value)
