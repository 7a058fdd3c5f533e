"""Launches every kernel once in each dtype and head size, on small uneven shapes, on a GPU.

For a checker of memory and races to watch:
``compute-sanitizer --tool memcheck python benchmarks/launch_all.py``, and ``--tool racecheck``.
``--dtypes`` and ``--parts`` take some of them only.
"""

import argparse
import itertools

import mlx.core as mx
from timing import card

from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.attention.selective.definition import selective_step
from mlx_selective.attention.ssa.definition import multiply_rows
from mlx_selective.kernels import ssa_temperature
from mlx_selective.kernels.causal_attention import HEAD_SIZES, causal_attention
from mlx_selective.kernels.choice import FLOATS
from mlx_selective.kernels.selective import selective
from mlx_selective.kernels.tile_words import tile_words

#: queries and keys
LENGTHS = [(1, 7), (33, 127), (150, 200)]


def main() -> None:
    """Prints how many results there were."""
    names = {str(dtype).removeprefix("mlx.core."): dtype for dtype in FLOATS}
    parts = {"tiles": tiles, "prompts": prompts, "decode": decode}
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", default=list(names), choices=list(names), nargs="+")
    parser.add_argument("--parts", default=list(parts), choices=list(parts), nargs="+")
    options = parser.parse_args()
    print(card())
    results = []
    for dtype, part in itertools.product(options.dtypes, options.parts):
        for D in HEAD_SIZES:
            results += parts[part](names[dtype], D)
    mx.eval(results)
    mx.synchronize()
    print(f"{len(results)} results")


def tiles(dtype: mx.Dtype, D: int) -> list[mx.array]:
    """The words of the tile vocabulary, and SSA's rows."""
    x, tau = normal((2, 11, 3, D), dtype).swapaxes(1, 2), mx.ones((2, 3, 11, 1))
    words = tile_words(*(normal((32, 64), dtype) for _ in range(3))) if D == 64 else []
    return [*words, ssa_temperature(x, tau, multiply_rows, smallest=0)]


def prompts(dtype: mx.Dtype, D: int) -> list[mx.array]:
    """Attention of many queries, in one chunk and in several."""
    results = []
    for T, N in LENGTHS:
        q, k, v = (normal((1, h, n, D), dtype) for h, n in ((2, T), (1, N), (1, N)))
        # logits so large that later blocks of keys rescale the sums of earlier ones
        results.append(causal_attention(8 * q, k, v, scale=D**-0.5))
        results += selective_attention(q, k, v, scale=D**-0.5, return_remaining=True)
        results += stick_breaking_attention(q, k, v, scale=D**-0.5)
    # chunks of queries, of which the third takes the first one's room for its mask
    q, k, v = (normal((1, h, 400, D), dtype) for h in (2, 1, 1))
    token = mx.arange(400)[None]
    own = {"query_positions": token, "key_positions": token, "definition": None, "chunk": 1}
    return results + selective(q, k, v, mx.zeros((1, 400)), scale=D**-0.5, **own)


def decode(dtype: mx.Dtype, D: int) -> list[mx.array]:
    """One token over a cache of one split, short and long, and of several."""
    results = []
    for N in (40, 1000, 4200):
        q, k, v = (normal((2, h, n, D), dtype) for h, n in ((4, 1), (2, N), (2, N)))
        positions = mx.broadcast_to(mx.arange(N), (2, N))
        results += selective_step(
            q,
            k,
            v,
            scale=D**-0.5,
            query_positions=positions[:, -1:],
            key_positions=positions,
            F=mx.zeros((2, N)),
            evicts=[1, 1],
        )
        results += stick_breaking_attention(q, k, v, scale=D**-0.5)
    return results


def normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Random numbers of a dtype."""
    return mx.random.normal(shape).astype(dtype)


if __name__ == "__main__":
    main()
