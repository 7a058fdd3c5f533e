"""Counts of MLX's steel_attention beside the project's metal/attention/causal.metal.

    python tests/metal_host/proof/compare_attention.py [--heads 8] [--lengths 256 512]
        [--dtype float16]

Both kernels run here, causal, and every access and product is counted: the figures are exact.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx

import metal_host
from metal_host.proof.attention_counts import visits
from metal_host.proof.mlx_attention import Problem, steel, tolerance
from metal_host.proof.numbers import error
from mlx_selective.kernels import launched_by
from mlx_selective.kernels.causal_attention import causal_attention

#: names of the same arrays in both kernels; what is read from constant memory is left out
ARRAYS = {"Q", "K", "V", "O", "q", "k", "v", "out"}


def reports(problem: Problem) -> tuple[metal_host.Report, metal_host.Report]:
    """MLX's and the project's, of a problem that both solve rightly."""
    truth, _ = problem.truth()
    theirs = steel(problem)
    with launched_by(metal_host.execute), metal_host.recording() as recorded:
        ours = causal_attention(problem.q, problem.k, problem.v, scale=problem.scale)
    for result in (theirs.out, ours):
        assert error(result, truth) <= tolerance(problem)
    return theirs.report, recorded[0]


def figures(report: metal_host.Report, problem: Problem) -> dict[str, int]:
    """The rows of the table. Matrix products follow from the blocks; scalar ones are the rest."""
    at, D = visits(problem), problem.q.shape[3]
    matrices = at.blocks * at.bq * at.bk * 2 * D
    return {
        "multiply-accumulates of matrices": matrices,
        "multiply-accumulates, scalar": report.multiply_accumulates - matrices,
        "special functions": report.special_functions,
        "device bytes read": _arrays(report.device_read),
        "device bytes written": _arrays(report.device_written),
        "threadgroup bytes read": report.threadgroup_read,
        "threadgroup bytes written": report.threadgroup_written,
        "threadgroup memory": report.threadgroup_memory,
        "threadgroup barriers": report.barriers,
        "simdgroup operations": report.simd_operations,
    }


def table(problem: Problem) -> str:
    """Both kernels' figures, and how they compare."""
    B, H, _, T, N, D = problem.shape()
    dtype = str(problem.q.dtype).removeprefix("mlx.core.")
    lines = [
        f"B {B}, H {H}, T {T}, N {N}, D {D}, {dtype}, causal",
        f"{'':34}{'steel_attention':>18}{'causal.metal':>18}{'ratio':>8}",
    ]
    theirs, ours = (figures(report, problem) for report in reports(problem))
    for name, value in theirs.items():
        ratio = f"{ours[name] / value:8.3f}" if value else ""
        lines.append(f"{name:34}{value:18,}{ours[name]:18,}{ratio}")
    return "\n".join(lines)


def _arrays(counts: dict[str, int]) -> int:
    return sum(count for name, count in counts.items() if name in ARRAYS)


def main() -> None:
    """Prints a table for each head size and length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    options = parser.parse_args()
    for size in options.sizes:
        for length in options.lengths:
            dtype = getattr(mx, options.dtype)
            problem = Problem.random(
                dtype, H=options.heads, T=length, N=length, D=size, mask="causal"
            )
            print(table(problem), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
