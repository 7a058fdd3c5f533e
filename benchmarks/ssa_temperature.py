"""SSA's temperature: the kernel, plain MLX and plain MLX under mx.compile, on a GPU.

``python benchmarks/ssa_temperature.py`` prints the table of docs/performance.md. x is (1, 32, T,
128) with heads and tokens swapped in memory, as projections come. Time as in timing.py.
"""

import mlx.core as mx
from timing import card, median_ms

from mlx_selective.attention.ssa.definition import multiply_rows
from mlx_selective.kernels import ssa_temperature

HEADS, HEAD_SIZE = 32, 128
LENGTHS = (1, 1024, 4096, 16384)


def main() -> None:
    """Prints the machine and one row for each dtype and length."""
    print(f"{card()}, mlx {mx.__version__}, (1, {HEADS}, T, {HEAD_SIZE})")
    print("dtype         T   kernel ms   plain ms   compiled ms")
    compiled = mx.compile(multiply_rows)
    for dtype in (mx.bfloat16, mx.float32):
        for T in LENGTHS:
            x = mx.random.normal((1, T, HEADS, HEAD_SIZE)).astype(dtype)
            tau = mx.random.uniform(0.5, 2, (1, HEADS, T, 1))
            mx.eval(x, tau)
            x = x.swapaxes(1, 2)
            calls = [
                lambda x=x, tau=tau: ssa_temperature(x, tau, multiply_rows, smallest=0),
                lambda x=x, tau=tau: multiply_rows(x, tau),
                lambda x=x, tau=tau: compiled(x, tau),
            ]
            if not mx.array_equal(calls[0](), calls[1]()):
                raise SystemExit(f"{dtype}, T {T}: the results differ.")
            times = "".join(f"{ms:>12.3f}" for ms in median_ms(calls))
            print(f"{str(dtype).removeprefix('mlx.core.'):<9}{T:>6}{times}", flush=True)


if __name__ == "__main__":
    main()
