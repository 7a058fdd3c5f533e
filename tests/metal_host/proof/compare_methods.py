"""Counts of the methods' kernels beside MLX's causal steel_attention on the same shape.

    python tests/metal_host/proof/compare_methods.py [--heads 8 32] [--sizes 64 128] [--length 256]
        [--dtype float16]

Every access and product is counted as the kernels run on the processor: the figures are exact.
"""

import argparse
import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import mlx.core as mx
import numpy as np

import metal_host
from metal_host.proof.mlx_attention import Problem, steel
from mlx_selective import selective_attention, stick_breaking_attention
from mlx_selective.kernels import launched_by


def selective(problem: Problem) -> mx.array:
    """Selective attention of the whole sequence."""
    return selective_attention(problem.q, problem.k, problem.v, scale=problem.scale)


def stick_breaking(problem: Problem) -> mx.array:
    """Stick-breaking attention, with logits so low that no stick ends early."""
    q, k = mx.abs(problem.q), -mx.abs(problem.k)
    return stick_breaking_attention(q, k, problem.v, scale=problem.scale)[0]


METHODS = {"selective": selective, "stick_breaking": stick_breaking}


def counts(reports: list[metal_host.Report]) -> dict[str, int]:
    """What counts, of all launches together; threadgroup memory of the largest."""
    return {
        "multiply-accumulates": sum(report.multiply_accumulates for report in reports),
        "special functions": sum(report.special_functions for report in reports),
        "device bytes": sum(_bytes(report) for report in reports),
        "threadgroup bytes read": sum(report.threadgroup_read for report in reports),
        "threadgroup memory": max(report.threadgroup_memory for report in reports),
        "threadgroup barriers": sum(report.barriers for report in reports),
        "launches": len(reports),
    }


def both(method: str, problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
    """Counts of steel_attention and of the method's kernels."""
    theirs = counts([steel(problem).report])
    with launched_by(metal_host.execute), metal_host.recording() as reports:
        out = METHODS[method](problem)
        mx.eval(out)
    assert np.isfinite(np.array(out.astype(mx.float32))).all()
    return theirs, counts(reports)


def table(method: str, problem: Problem) -> str:
    """Both counts, and how they compare."""
    B, H, _, T, _, D = problem.shape()
    dtype = str(problem.q.dtype).removeprefix("mlx.core.")
    lines = [
        f"B {B}, H {H}, T = N = {T}, D {D}, {dtype}",
        f"{'':26}{'steel_attention':>18}{method:>18}{'ratio':>8}",
    ]
    theirs, ours = both(method, problem)
    for name, value in theirs.items():
        lines.append(f"{name:26}{value:18,}{ours[name]:18,}{ours[name] / value:8.3f}")
    return "\n".join(lines)


def square(dtype: mx.Dtype, heads: int, length: int, size: int) -> Problem:
    """A causal problem of as many queries as keys."""
    return Problem.random(dtype, H=heads, T=length, N=length, D=size, mask="causal")


def _bytes(report: metal_host.Report) -> int:
    """Read and written in device memory; what constant memory holds is read from a cache."""
    read = {name: n for name, n in report.device_read.items() if name not in CONSTANT}
    return sum(read.values()) + sum(report.device_written.values())


#: small arrays that every thread reads, in constant memory
CONSTANT = {"params", "mask_params", "sizes", "scale", "numbers"}


def main() -> None:
    """Prints a table for each method, head count and head size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float16")
    options = parser.parse_args()
    for method in METHODS:
        for heads in options.heads:
            for size in options.sizes:
                problem = square(getattr(mx, options.dtype), heads, options.length, size)
                print(table(method, problem), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
