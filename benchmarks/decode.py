"""One token over a cache: selective and stick-breaking attention beside MLX's fused attention.

``python benchmarks/decode.py [--dtype bfloat16] [--lengths 4096 32768]`` prints the table of
docs/performance.md: B 1, 32 heads of queries, over as many heads of keys or 8. Selective attention
comes with the new F and the key to evict, which the other has not. Stick-breaking's queries and
keys have logits about -10, so that every key is read. Each row is compared with plain MLX before
it is timed. ``GB/s``: bytes of keys and values over the time. Time as in timing.py.
"""

import argparse
import itertools

import mlx.core as mx
from stick_breaking import with_mean
from timing import card, demand_close, median_ms

from mlx_selective import stick_breaking_attention
from mlx_selective.attention.selective.definition import plain_selective, selective_step
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking

HEADS, KEY_HEADS, HEAD_SIZES = 32, (32, 8), (64, 128)
TOGETHER = 50


def main() -> None:
    """Prints the machine and one row for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--lengths", default=[4096, 32768], type=int, nargs="+")
    options = parser.parse_args()
    print(f"{card()}, mlx {mx.__version__}, {options.dtype}, B 1, H {HEADS}, one query")
    print("                 us: selective  stick-breaking  mx.fast   ratios         GB/s")
    for heads, D, N in itertools.product(KEY_HEADS, HEAD_SIZES, options.lengths):
        mx.random.seed(0)
        shapes = [(1, h, n, D) for h, n in ((HEADS, 1), (heads, N), (heads, N))]
        q, k, v = (mx.random.normal(s).astype(getattr(mx, options.dtype)) for s in shapes)
        q, k = with_mean(q, k, -10, D**-0.5)
        mx.eval(q, k, v)
        calls = checked_calls(q, k, v, D**-0.5)
        times = [1e3 * ms for ms in median_ms(calls, TOGETHER)]
        ratios = [times[n] / times[2] for n in (0, 1)]
        rates = [2 * k.nbytes / time / 1e3 for time in times]
        print(
            f"Hkv {heads:>2} D {D:>3} N {N:>5} {times[0]:>8.1f} {times[1]:>15.1f} {times[2]:>8.1f}"
            f" {ratios[0]:>8.2f} {ratios[1]:>5.2f} " + "".join(f"{r:>7.0f}" for r in rates),
            flush=True,
        )


def checked_calls(q: mx.array, k: mx.array, v: mx.array, scale: float) -> list:
    """The three calls, after ours were compared with plain MLX."""
    N = k.shape[2]
    positions = mx.arange(N)[None]
    F = mx.random.uniform(0, 3, (1, N))
    mx.eval(positions, F)
    state = {"query_positions": positions[:, -1:], "key_positions": positions}

    def select():
        return selective_step(q, k, v, scale=scale, F=F, evicts=[1], **state)

    def stick():
        return stick_breaking_attention(q, k, v, scale=scale)

    state_of_plain = {"remaining": False, "documents": None, "block_size": 1, **state}
    plain = plain_selective(q, k, v, F, scale=scale, **state_of_plain)
    for ours, theirs in zip(select()[:2], plain, strict=True):
        demand_close(ours, theirs, f"selective, N {N}")
    plain = plain_stick_breaking(q, k, v, scale=scale, attend_current=False)
    demand_close(stick()[0], plain[0], f"stick-breaking, N {N}")
    fast = mx.fast.scaled_dot_product_attention
    return [select, stick, lambda: fast(q, k, v, scale=scale)]


if __name__ == "__main__":
    main()
