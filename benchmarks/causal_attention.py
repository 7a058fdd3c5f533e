"""Plain causal attention on the tile vocabulary beside MLX's own fused attention, on a GPU.

``python benchmarks/causal_attention.py [--dtype bfloat16] [--heads 32]
[--lengths 4096 16384]`` prints the table of
docs/performance.md. Each shape is compared before it is timed, and the script fails where the
results differ.

Time as in timing.py. TFLOP/s: 4 B H D operations for each pair of a query and a key that it sees,
N (N + 1) / 2 of them, over that time. Nothing else counts.
"""

import argparse
import itertools

import mlx.core as mx
from timing import card, demand_close, median_ms

from mlx_selective.kernels.causal_attention import causal_attention

HEAD_SIZES = (64, 128)


def main() -> None:
    """Prints the machine and one row for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--heads", default=32, type=int)
    parser.add_argument("--lengths", default=[4096, 16384], type=int, nargs="+")
    options = parser.parse_args()
    dtype, heads = getattr(mx, options.dtype), options.heads
    print(f"{card()}, mlx {mx.__version__}, {options.dtype}, B 1, H {heads}")
    print("     N    D   difference   kernel ms  TFLOP/s   mx.fast ms  TFLOP/s   ratio")
    for D, N in itertools.product(HEAD_SIZES, options.lengths):
        mx.random.seed(0)
        q, k, v = (mx.random.normal((1, heads, N, D)).astype(dtype) for _ in range(3))
        mx.eval(q, k, v)
        calls = [
            lambda q=q, k=k, v=v, D=D: causal_attention(q, k, v, scale=D**-0.5),
            lambda q=q, k=k, v=v, D=D: mx.fast.scaled_dot_product_attention(
                q, k, v, scale=D**-0.5, mask="causal"
            ),
        ]
        difference = demand_close(calls[0](), calls[1](), f"N {N}, D {D}")
        ours, theirs = median_ms(calls)
        work = 4 * heads * D * N * (N + 1) / 2 / 1e9
        print(
            f"{N:>6} {D:>4} {difference:>12.1e} {ours:>11.3f} {work / ours:>8.0f}"
            f" {theirs:>12.3f} {work / theirs:>8.0f} {ours / theirs:>7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
