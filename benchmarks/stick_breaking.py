"""Stick-breaking attention over a prompt beside its authors' Triton kernel, on a GPU.

``python benchmarks/stick_breaking.py [--heads 32] [--lengths 4096 16384]`` prints the table of
docs/performance.md, in bfloat16. ``short`` sticks are those of random queries and keys: a few
dozen keys use them up, and the kernel stops there, which Triton's does not. ``long`` ones have
logits about -10, so that every key is read. Triton's needs PyTorch and an installed
``stickbreaking_attention`` (https://github.com/shawntan/stickbreaking-attention); without it the
results are compared with plain MLX. Time as in timing.py.
"""

import argparse
import itertools

import mlx.core as mx
from timing import card, demand_close, median_ms

from mlx_selective import stick_breaking_attention
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking
from mlx_selective.kernels.stick_breaking import stick_breaking

try:
    import torch
    from stickbreaking_attention.sb_attn import sb_attn
except ImportError:
    torch = None

HEAD_SIZES = (64, 128)
STICKS = {"short": 0, "long": -10}


def main() -> None:
    """Prints the machine and one row for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--heads", default=32, type=int)
    parser.add_argument("--lengths", default=[4096, 16384], type=int, nargs="+")
    options = parser.parse_args()
    print(f"{card()}, mlx {mx.__version__}, bfloat16, B 1, H {options.heads}")
    print("     N   D  sticks  differ-   ms: kernel  log form   Triton  mx.fast   kernel/Triton")
    for D, N, sticks in itertools.product(HEAD_SIZES, options.lengths, STICKS):
        q, k, v = (random_heads(options.heads, N, D, n) for n in range(3))
        q, k = with_mean(q, k, STICKS[sticks], D**-0.5)
        mx.eval(q, k, v)
        calls = our_calls(q, k, v, D**-0.5)
        if torch is not None:
            calls.append(triton_call(q, k, v))
            other = mx.array(calls[-1]()[0].float().cpu().numpy())
        else:
            other = plain_stick_breaking(q, k, v, scale=D**-0.5, attend_current=False)[0]
        difference = demand_close(calls[0]()[0], other, f"N {N}, D {D}, {sticks}")
        ours, log, fast, *triton = median_ms(calls)
        theirs = f"{triton[0]:>8.3f}" if triton else f"{'-':>8}"
        ratio = f"{ours / triton[0]:>15.2f}" if triton else ""
        print(
            f"{N:>6} {D:>3}  {sticks:<6} {difference:>8.1e} {ours:>12.3f} {log:>9.3f} {theirs}"
            f" {fast:>8.3f} {ratio}",
            flush=True,
        )


def our_calls(q: mx.array, k: mx.array, v: mx.array, scale: float) -> list:
    """The kernel as users get it, its log form, and MLX's softmax attention."""
    log = {"scale": scale, "definition": plain_stick_breaking, "product_form": False}
    return [
        lambda: stick_breaking_attention(q, k, v, scale=scale),
        lambda: stick_breaking(q, k, v, **log),
        lambda: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask="causal"),
    ]


def triton_call(q: mx.array, k: mx.array, v: mx.array):
    """The upstream kernel on the same numbers, without what only a backward pass needs."""
    q, k, v = map(to_torch, (q, k, v))
    return lambda: sb_attn(q, k, v)


def to_torch(array: mx.array):
    """A copy on PyTorch's side, bfloat16."""
    import numpy as np

    host = torch.from_numpy(np.array(array.astype(mx.float32)))
    return host.to("cuda", torch.bfloat16)


def random_heads(heads: int, length: int, size: int, seed: int) -> mx.array:
    """(1, heads, length, size) of standard deviation 1, bfloat16."""
    key = mx.random.key(seed)
    return mx.random.normal((1, heads, length, size), key=key).astype(mx.bfloat16)


def with_mean(q: mx.array, k: mx.array, mean: float, scale: float) -> tuple[mx.array, mx.array]:
    """Queries and keys whose scaled logits have ``mean``, at most 0: by their first elements."""
    first = (-mean / scale) ** 0.5
    return (
        mx.concatenate([mx.full((*x.shape[:3], 1), sign * first, x.dtype), x[..., 1:]], axis=-1)
        for x, sign in ((q, 1), (k, -1))
    )


if __name__ == "__main__":
    main()
