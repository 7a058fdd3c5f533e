"""One token over a cache: selective and stick-breaking attention beside MLX's fused attention.

``python benchmarks/decode.py [--dtype bfloat16] [--lengths 4096 32768]`` prints the tables of
docs/performance.md: B 1, 32 heads of queries, over as many heads of keys or 8. Selective attention
comes with the new F and the key to evict, which the other has not. Stick-breaking's queries and
keys have logits about -10, so that every key is read. Each row is compared with plain MLX before
it is timed.

``in a chain``: as a model decodes. Layers have caches of their own, a layer's query is the query
before plus its output, and a token is built while the GPU works at the one before; what the
addition alone takes is taken away. ``side by side``: 50 calls that do not depend on one another,
waited for together, of which a GPU works at several at once. ``GB/s``: bytes of keys and values
over the time in a chain.
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import mlx.core as mx
from stick_breaking import with_mean
from timing import card, demand_close, median_ms

from mlx_selective import stick_breaking_attention
from mlx_selective.attention.selective.definition import plain_selective, selective_step
from mlx_selective.attention.stick_breaking.definition import plain_stick_breaking

HEADS, KEY_HEADS, HEAD_SIZES = 32, (32, 8), (64, 128)
#: layers of a chain, each with a cache; tokens of a round; rounds
LAYERS, TOKENS, ROUNDS = 12, 20, 9
#: side by side, and rounds of those
TOGETHER, ROUNDS_TOGETHER = 50, 30


class Cache(NamedTuple):
    """Keys and values (1, Hkv, N, D), F and positions (1, N), and the query's ``own`` (1, 1)."""

    k: mx.array
    v: mx.array
    F: mx.array
    own: mx.array
    positions: mx.array


def main() -> None:
    """Prints the machine and one row for each shape."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--lengths", default=[4096, 32768], type=int, nargs="+")
    options = parser.parse_args()
    dtype = getattr(mx, options.dtype)
    print(f"{card()}, mlx {mx.__version__}, {options.dtype}, B 1, H {HEADS}, one query; us")
    print("                 in a chain: selective  stick-b.  mx.fast   ratios        GB/s", end="")
    print("          side by side: selective  stick-b.  mx.fast   ratios")
    for heads, D, N in itertools.product(KEY_HEADS, HEAD_SIZES, options.lengths):
        q, caches = make_caches(heads, D, N, dtype)
        calls = make_calls(D**-0.5)
        check(q, caches[0], calls, D**-0.5)
        chained = chain_us(q, caches, calls)
        beside = [partial(call, q, caches[0]) for call in calls]
        times = [1e3 * ms for ms in median_ms(beside, TOGETHER, ROUNDS_TOGETHER)]
        size = caches[0].k.nbytes + caches[0].v.nbytes
        rates = "".join(f"{size / one / 1e3:>6.0f}" for one in chained)
        print(
            f"Hkv {heads:>2} D {D:>3} N {N:>5}",
            row(chained),
            rates,
            f"{row(times):>48}",
            flush=True,
        )


def row(times: list[float]) -> str:
    """Microseconds of the three, and the first two over the last."""
    ratios = "".join(f"{one / times[2]:>6.2f}" for one in times[:2])
    return f"{times[0]:>15.1f} {times[1]:>9.1f} {times[2]:>8.1f}  {ratios}"


def make_caches(heads: int, D: int, N: int, dtype: mx.Dtype) -> tuple[mx.array, list[Cache]]:
    """A query (1, HEADS, 1, D), and a cache for each layer."""
    caches = []
    for layer in range(LAYERS):
        mx.random.seed(layer)
        shapes = [(1, h, n, D) for h, n in ((HEADS, 1), (heads, N), (heads, N))]
        q, k, v = (mx.random.normal(s).astype(dtype) for s in shapes)
        q, k = with_mean(q, k, -10, D**-0.5)
        F, positions = mx.random.uniform(0, 3, (1, N)), mx.arange(N)[None]
        own = mx.contiguous(positions[:, -1:])
        # so small that adding outputs to queries leaves their logits as they are
        caches.append(Cache(k, v / 1024, F, own, positions))
        mx.eval(q, caches[-1])
    return q, caches


def make_calls(scale: float) -> list[Callable]:
    """Selective, stick-breaking and MLX's attention of a query and a cache."""

    def select(q, cache):
        state = {"query_positions": cache.own, "key_positions": cache.positions, "F": cache.F}
        return selective_step(q, cache.k, cache.v, scale=scale, evicts=[1], **state)[0]

    def stick(q, cache):
        return stick_breaking_attention(q, cache.k, cache.v, scale=scale)[0]

    def fast(q, cache):
        return mx.fast.scaled_dot_product_attention(q, cache.k, cache.v, scale=scale)

    return [select, stick, fast]


def chain_us(q: mx.array, caches: list[Cache], calls: list[Callable]) -> list[float]:
    """Microseconds of one call of each in a chain, without the addition's."""
    nothing = mx.zeros_like(q)
    calls = [*calls, lambda q, cache: nothing]
    spent = [[] for _ in calls]
    for turn in range(ROUNDS + 1):
        for call, times in zip(calls, spent, strict=True):
            mx.synchronize()
            begin = time.perf_counter()
            follow(q, caches, call)
            if turn:  # the first one warms up
                times.append((time.perf_counter() - begin) / (TOKENS * LAYERS) * 1e6)
    *times, addition = (statistics.median(one) for one in spent)
    return [one - addition for one in times]


def follow(q: mx.array, caches: list[Cache], call: Callable) -> None:
    """TOKENS tokens through all layers, asked for as mlx-lm's generation does."""
    before = q
    for _ in range(TOKENS):
        x = before
        for cache in caches:
            x = x + call(x, cache)
        mx.async_eval(x)
        mx.eval(before)
        before = x
    mx.eval(before)


def check(q: mx.array, cache: Cache, calls: list[Callable], scale: float) -> None:
    """Compares ours with plain MLX."""
    N = cache.k.shape[2]
    state = {"remaining": False, "documents": None, "block_size": 1}
    state |= {"query_positions": cache.own, "key_positions": cache.positions}
    plain = plain_selective(q, cache.k, cache.v, cache.F, scale=scale, **state)
    demand_close(calls[0](q, cache), plain[0], f"selective, N {N}")
    plain = plain_stick_breaking(q, cache.k, cache.v, scale=scale, attend_current=False)
    demand_close(calls[1](q, cache), plain[0], f"stick-breaking, N {N}")


if __name__ == "__main__":
    main()
