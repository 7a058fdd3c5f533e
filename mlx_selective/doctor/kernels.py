"""Every kernel on the user's own machine: compiled, run, held to NumPy float64, timed."""

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

from ..kernels import find_backend, outputs_start_as, record
from ..output import safe_text
from .kernel_cases import CHECKS, KernelCheck

#: What a kernel's RMS-relative error may have beyond twice that of plain MLX in its dtype.
FLOORS = {mx.float32: 2e-7, mx.float16: 1e-4, mx.bfloat16: 1e-3}
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
    print(f"allowed: twice plain plus {floors}; ms: median of one call, {backend.name}")
    print(f"{sum(good)} of {len(good)} ok")
    return all(good)


def _row(check: KernelCheck, dtype: mx.Dtype, size: int, lines: int) -> bool:
    """Checks and prints one row, and that many lines of a message; tells whether it is right."""
    start = [check.name, _name(dtype), size]
    try:
        plain, error = _errors(check, dtype, size)
        times = _times(check, dtype, size)
    except Exception as fault:  # a compiler's, MLX's or the kernel's own: all go into the report
        print(_ROW.format(*start, *["-"] * 5, "FAILED"), flush=True)
        for line in str(fault).splitlines()[:lines]:
            print(f"    {safe_text(line)[:_WIDTH]}")
        return False
    allowed = 2 * plain + FLOORS[dtype]
    good = bool(error <= allowed)  # an error that is not a number fails too
    figures = [f"{number:.1e}" for number in (error, plain, allowed)]
    figures += [f"{number:.3f}" for number in times]
    print(_ROW.format(*start, *figures, "ok" if good else "FAILED"), flush=True)
    return good


def _errors(check: KernelCheck, dtype: mx.Dtype, size: int) -> tuple[float, float]:
    """RMS-relative errors of plain MLX and of the kernel, whose outputs start as NaN."""
    arguments = check.arguments(np.random.default_rng(0), (*check.checked, size), dtype)
    truth = check.truth(*map(_float64, arguments))
    plain = _error(check.plain(*arguments), truth)
    with outputs_start_as(float("nan")):
        return plain, _error(_must_run(check, arguments), truth)


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


def _error(results, truths) -> float:
    """The largest RMS-relative error among a function's results, one or several."""
    results, truths = (
        [one] if isinstance(one, (mx.array, np.ndarray)) else one for one in (results, truths)
    )
    return max(
        float(np.sqrt(((_float64(result) - truth) ** 2).mean() / (truth**2).mean()))
        for result, truth in zip(results, truths, strict=True)
    )


def _float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _name(dtype: mx.Dtype) -> str:
    return str(dtype).removeprefix("mlx.core.")
