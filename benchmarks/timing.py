"""What the benchmarks share: how a call is timed, its memory, how results are compared.

Time: the median over rounds of several independent calls that are waited for together, divided
by their number; all sides take turns in one process. Memory: the most that MLX holds during one
call, its inputs included.
"""

import statistics
import subprocess
import time
from collections.abc import Callable, Sequence

import mlx.core as mx

from mlx_selective.kernels import find_backend

ROUNDS, TOGETHER = 9, 10
#: root mean square difference of two results in half precision, relative
LIMIT = 5e-3


def median_ms(
    calls: Sequence[Callable], together: int = TOGETHER, rounds: int = ROUNDS
) -> list[float]:
    """Milliseconds of one call of each, taking turns.

    Args:
        calls: functions of no arguments that give arrays, MLX's or PyTorch's.
        together: how many calls are waited for together.
        rounds: of which the median is taken; one more warms up.
    """
    spent = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, times in zip(calls, spent, strict=True):
            mx.synchronize()
            begin = time.perf_counter()
            finish([call() for _ in range(together)])
            if turn:  # the first one warms up
                times.append((time.perf_counter() - begin) / together * 1e3)
    return [statistics.median(times) for times in spent]


def finish(results: list) -> None:
    """Waits until results, MLX's or PyTorch's, are there."""
    one = results[0]
    while isinstance(one, (list, tuple)):
        one = one[0]
    if isinstance(one, mx.array):
        mx.eval(results)
        mx.synchronize()
    else:
        import torch

        torch.cuda.synchronize()


def peak_bytes(call: Callable) -> int:
    """The most that MLX holds during one call."""
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    mx.eval(call())
    mx.synchronize()
    return mx.get_peak_memory()


def relative_difference(a: mx.array, b: mx.array) -> float:
    """Root mean square of the difference, relative to b; computed in float32."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return mx.sqrt(mx.mean((a - b) ** 2) / mx.mean(b**2)).item()


def demand_close(a: mx.array, b: mx.array, what: str) -> float:
    """Their relative difference.

    Raises:
        SystemExit: if it is beyond LIMIT: what is wrong is not timed.
    """
    difference = relative_difference(a, b)
    if not difference < LIMIT:
        raise SystemExit(f"{what}: the results differ by {difference:.1e}.")
    return difference


def card() -> str:
    """The GPU's name.

    Raises:
        SystemExit: where no kernels run, with the reason.
    """
    backend = find_backend()
    if backend.name is None:
        raise SystemExit(f"Kernels are measured on a GPU, and none run here: {backend.reason}.")
    if not mx.cuda.is_available():
        return str(mx.device_info().get("device_name", "?"))
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return f"{answer} (name, driver)"
