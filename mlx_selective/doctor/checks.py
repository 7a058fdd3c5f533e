"""The three methods against NumPy float64, small and quick, on the user's own machine."""

import mlx.core as mx
import numpy as np

from ..attention import selective_attention, ssa_attention, stick_breaking_attention
from .definitions import attend, selective, softmax, stick_breaking

#: Largest root mean square error, relative to the truth, that passes.
TOLERANCE = 1e-5
_SHAPE = {"B": 2, "H": 4, "Hkv": 2, "T": 65, "D": 16}


def check_methods() -> dict[str, float]:
    """RMS-relative error of each method in float32.

    Returns:
        Method name -> error; at most TOLERANCE where all is well.
    """
    rng = np.random.default_rng(0)
    shape = _SHAPE
    q, k, v = (
        rng.standard_normal((shape["B"], heads, shape["T"], shape["D"])).astype(np.float32)
        for heads in (shape["H"], shape["Hkv"], shape["Hkv"])
    )
    tau_q = rng.uniform(0.5, 2, q.shape[:3]).astype(np.float32)
    tau_v = rng.uniform(0.5, 2, v.shape[:3]).astype(np.float32)
    scale = 0.25
    arrays = [mx.array(array) for array in (q, k, v)]
    results = {
        "selective": (
            selective_attention(*arrays, scale=scale, block_size=32),
            attend(selective, q, k, v, scale),
        ),
        "ssa": (
            ssa_attention(*arrays, mx.array(tau_q), mx.array(tau_v), scale=scale),
            attend(softmax, q * tau_q[..., None], k, v * tau_v[..., None], scale),
        ),
        "stick_breaking": (
            stick_breaking_attention(*arrays, scale=scale, block_size=32)[0],
            attend(stick_breaking, q, k, v, scale),
        ),
    }
    return {name: _error(np.array(out), truth) for name, (out, truth) in results.items()}


def _error(result: np.ndarray, truth: np.ndarray) -> float:
    return float(np.sqrt(((result - truth) ** 2).mean() / (truth**2).mean()))
