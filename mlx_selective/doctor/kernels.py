"""Every kernel on the user's own machine: compiled, run, held to NumPy float64, timed."""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..kernels import find_backend, outputs_start_as, record
from ..output import safe_text
from .kernel_cases import CHECKS, KernelCheck

#: What a kernel's RMS-relative error may have beyond twice that of plain MLX in its dtype.
FLOORS = {mx.float32: 2e-7, mx.float16: 1e-4, mx.bfloat16: 1e-3}
#: A remainder is a product of hundreds of factors, whose exponentials a GPU knows to two ulp and
#: whose logits CUDA's matrix unit truncates as it adds: 8e-7 was seen on an H200.
REMAINDER_FLOOR = 2e-6
#: What plain MLX's own error counts at most: where it rounds float32 products to TF32, a kernel
#: may not.
CAPS = {mx.float32: 1e-6, mx.float16: 2e-3, mx.bfloat16: 2e-2}
#: Lines of a compiler's message that are shown, the first time a kernel fails and later.
MESSAGE_LINES, REPEATED_LINES = 12, 2
_WIDTH = 200

_ROW = "{:<18} {:<9} {:>4} {:>9} {:>9} {:>9} {:>10} {:>10}  {}"
_HEADER = ("kernel", "dtype", "D", "error", "plain", "allowed", "ms kernel", "ms plain", "")
#: calls that one timing takes together, so that MLX's way to the GPU counts less
_TOGETHER = 4
_ROUNDS = range(3, 16)
_SECONDS = 0.25


def check_kernels() -> bool:
    """Prints one row for each kernel, dtype and head size; True if all are right or none runs.

    Raises:
        UserError: if MLX_SELECTIVE_KERNELS cannot be followed.
    """
    backend = find_backend()
    if backend.name is None:
        print(f"No kernels run here: {backend.reason}. All methods run in plain MLX.")
        return True
    print(_ROW.format(*_HEADER).rstrip())
    good = []
    for check in CHECKS:
        lines = MESSAGE_LINES
        for dtype, size in check.cases():
            good.append(_row(check, dtype, size, lines))
            lines = lines if good[-1] else REPEATED_LINES
    print("\nerror: root mean square against NumPy float64, relative; plain: the same of plain MLX")
    floors = ", ".join(f"{floor:g} in {_name(dtype)}" for dtype, floor in FLOORS.items())
    print(f"allowed: twice plain plus {floors} (the result's dtype), {REMAINDER_FLOOR:g} for")
    print("remainders; ms: median of one call")
    print(f"{sum(good)} of {len(good)} ok")
    return all(good)


def _row(check: KernelCheck, dtype: mx.Dtype, size: int, lines: int) -> bool:
    """Checks and prints one row, and that many lines of a message; tells whether it is right."""
    start = [check.name, _name(dtype), size]
    try:
        worst = _errors(check, dtype, size)
        times = _times(check, dtype, size)
    except Exception as fault:  # a compiler's, MLX's or the kernel's own: all go into the report
        print(_ROW.format(*start, *["-"] * 5, "FAILED"), flush=True)
        for line in str(fault).splitlines()[:lines]:
            print(f"    {safe_text(line)[:_WIDTH]}")
        return False
    good = worst.used <= 1
    figures = [f"{number:.1e}" for number in (worst.error, worst.plain, worst.allowed)]
    figures += [f"{number:.3f}" for number in times]
    verdict = "ok" if good else f"FAILED {worst.result}".rstrip()
    print(_ROW.format(*start, *figures, verdict), flush=True)
    return good


class Errors(NamedTuple):
    """RMS-relative errors of one result of a kernel: the kernel's own, plain MLX's, the bound."""

    result: str
    error: float
    plain: float
    allowed: float

    @property
    def used(self) -> float:
        """The share of what is allowed; endless for an error that is not a number."""
        return self.error / self.allowed if np.isfinite(self.error) else np.inf


def _errors(check: KernelCheck, dtype: mx.Dtype, size: int) -> Errors:
    """The errors of the result that is nearest to its bound, or furthest beyond it."""
    arguments = check.arguments(np.random.default_rng(0), (*check.checked, size), dtype)
    truths = _listed(check.truth(*map(_float64, arguments)))
    plain = _listed(check.plain(*arguments))
    with outputs_start_as(float("nan")):
        results = _listed(_must_run(check, arguments))
    return max(map(_judged, check.results, results, plain, truths), key=lambda one: one.used)


def _judged(name: str, result: mx.array, plain: mx.array, truth: np.ndarray) -> Errors:
    """One result beside plain MLX and the truth; its own dtype decides what is allowed."""
    of_plain = _error(plain, truth)
    allowed = 2 * min(of_plain, CAPS[result.dtype])
    allowed += REMAINDER_FLOOR if name == "remainder" else FLOORS[result.dtype]
    return Errors(name, _error(result, truth), of_plain, allowed)


def _must_run(check: KernelCheck, arguments: list):
    """The kernel's result, evaluated."""
    with record() as ran:
        result = check.kernel(*arguments)
    if result is None:
        raise RuntimeError(f"The kernel was not chosen: {ran[-1].reason}.")
    mx.eval(result)
    return result


def _times(check: KernelCheck, dtype: mx.Dtype, size: int) -> list[float]:
    """Milliseconds of a call: kernel, plain MLX."""
    arguments = check.arguments(np.random.default_rng(1), (*check.timed, size), dtype)
    mx.eval(arguments)
    return [_median_ms(lambda f=f: f(*arguments)) for f in (check.kernel, check.plain)]


def _median_ms(call: Callable) -> float:
    mx.eval(call())  # the first one compiles
    spent = []
    while len(spent) < _ROUNDS.start or (len(spent) < _ROUNDS.stop and sum(spent) < _SECONDS):
        mx.synchronize()
        begin = time.perf_counter()
        mx.eval([call() for _ in range(_TOGETHER)])
        mx.synchronize()
        spent.append(time.perf_counter() - begin)
    return 1000 * statistics.median(spent) / _TOGETHER


def _error(result: mx.array, truth: np.ndarray) -> float:
    return float(np.sqrt(((_float64(result) - truth) ** 2).mean() / (truth**2).mean()))


def _listed(one_or_more) -> list:
    return [one_or_more] if isinstance(one_or_more, (mx.array, np.ndarray)) else one_or_more


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
