"""Launches every kernel once in each dtype and head size, on small uneven shapes, on a GPU.

For a checker of memory and races to watch:
``compute-sanitizer --tool memcheck python benchmarks/launch_all.py``, and ``--tool racecheck``.
``--dtypes`` takes some of them only.
"""

import argparse

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
    """Prints how many launches there were."""
    names = {str(dtype).removeprefix("mlx.core."): dtype for dtype in FLOATS}
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtypes", default=list(names), choices=list(names), nargs="+")
    print(card())
    launches = []
    for dtype in (names[name] for name in parser.parse_args().dtypes):
        launches.append(tile_words(*(normal((32, 64), dtype) for _ in range(3))))
        for D in HEAD_SIZES:
            x, tau = normal((2, 11, 3, D), dtype).swapaxes(1, 2), mx.ones((2, 3, 11, 1))
            launches.append(ssa_temperature(x, tau, multiply_rows, smallest=0))
            for T, N in LENGTHS:
                q, k, v = (normal((1, h, n, D), dtype) for h, n in ((2, T), (1, N), (1, N)))
                # logits so large that later blocks of keys rescale the sums of earlier ones
                launches.append(causal_attention(8 * q, k, v, scale=D**-0.5))
                launches += selective_attention(q, k, v, scale=D**-0.5, return_remaining=True)
                launches += stick_breaking_attention(q, k, v, scale=D**-0.5)
            # chunks of queries, of which the third takes the first one's room for its mask
            q, k, v = (normal((1, h, 400, D), dtype) for h in (2, 1, 1))
            token = mx.arange(400)[None]
            own = {"query_positions": token, "key_positions": token, "definition": None, "chunk": 1}
            launches += selective(q, k, v, mx.zeros((1, 400)), scale=D**-0.5, **own)
            # a cache of one split, short and long, and of several
            for N in (40, 1000, 4200):
                q, k, v = (normal((2, h, n, D), dtype) for h, n in ((4, 1), (2, N), (2, N)))
                positions = mx.broadcast_to(mx.arange(N), (2, N))
                launches += selective_step(
                    q,
                    k,
                    v,
                    scale=D**-0.5,
                    query_positions=positions[:, -1:],
                    key_positions=positions,
                    F=mx.zeros((2, N)),
                    evicts=[1, 1],
                )
                launches += stick_breaking_attention(q, k, v, scale=D**-0.5)
    mx.eval(launches)
    mx.synchronize()
    print(f"{len(launches)} results")


def normal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Random numbers of a dtype."""
    return mx.random.normal(shape).astype(dtype)


if __name__ == "__main__":
    main()
