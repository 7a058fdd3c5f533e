"""Selective attention over a prompt beside its peers, on a GPU.

``python benchmarks/selective_attention.py [--dtype bfloat16] [--heads 32] [--lengths 4096 16384]``
prints the table of docs/performance.md: milliseconds and memory of the kernels, of MLX's fused
causal attention, and of the two-step form (F by plain MLX, then fused attention with an additive
mask). Each shape is compared with the two-step form before it is timed, and the script fails
where the results differ. Time and memory as in timing.py.
"""

import argparse
import itertools

import mlx.core as mx
from timing import card, demand_close, median_ms, peak_bytes

from mlx_selective import selective_attention

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
    print("            differ-        ms               ratio to         MB                   ratio")
    print(
        "     N   D    ence    kernels  mx.fast  two-step  mx.fast  two-step"
        "   kernels  mx.fast  to mx.fast"
    )
    for D, N in itertools.product(HEAD_SIZES, options.lengths):
        mx.random.seed(0)
        q, k, v = (mx.random.normal((1, heads, N, D)).astype(dtype) for _ in range(3))
        mx.eval(q, k, v)
        scale = D**-0.5
        calls = [
            lambda q=q, k=k, v=v, scale=scale: selective_attention(q, k, v, scale=scale),
            lambda q=q, k=k, v=v, scale=scale: mx.fast.scaled_dot_product_attention(
                q, k, v, scale=scale, mask="causal"
            ),
            lambda q=q, k=k, v=v, scale=scale: two_steps(q, k, v, scale),
        ]
        difference = demand_close(calls[0](), calls[2](), f"N {N}, D {D}")
        ours, fast, two = median_ms(calls)
        held = [peak_bytes(call) / 1e6 for call in calls[:2]]
        print(
            f"{N:>6} {D:>3} {difference:>7.1e} {ours:>10.3f} {fast:>8.3f} {two:>9.3f}"
            f" {ours / fast:>8.2f} {ours / two:>9.2f} {held[0]:>9.0f} {held[1]:>8.0f}"
            f" {held[0] / held[1]:>11.2f}",
            flush=True,
        )


@mx.compile
def additive_mask(q: mx.array, k: mx.array, scale: mx.array) -> mx.array:
    """-F and causal masking (B, 1, N, N) in q's dtype, of head 0's queries and keys (B, N, D)."""
    logits = (q @ k.swapaxes(1, 2)).astype(mx.float32) * scale
    token = mx.arange(q.shape[1])
    selects = (token > 0) & (token < token[:, None])
    F = mx.cumsum(mx.where(selects, mx.maximum(logits, 0), 0), axis=1, inclusive=False)
    return mx.where(token <= token[:, None], -F, -mx.inf).astype(q.dtype)[:, None]


def two_steps(q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
    """F by plain MLX, then fused attention."""
    mask = additive_mask(q[:, 0], k[:, 0], mx.array(scale))
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)


if __name__ == "__main__":
    main()
