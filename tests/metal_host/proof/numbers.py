"""Arrays of MLX beside NumPy's float64."""

import mlx.core as mx
import numpy as np


def float64(x: mx.array) -> np.ndarray:
    """The array's values, exactly."""
    return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x).astype(np.float64)


def error(result: mx.array | np.ndarray, truth: np.ndarray) -> float:
    """The root of the mean squared difference, relative to the truth's."""
    result = float64(result) if isinstance(result, mx.array) else result
    difference = ((result - truth) ** 2).mean()
    return float(np.sqrt(difference / max((truth**2).mean(), 1e-30)))
