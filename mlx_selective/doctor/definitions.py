"""The methods' definitions in NumPy float64, which ship with the package to check it anywhere."""

from collections.abc import Callable

import numpy as np


def attend(
    weights: Callable[[np.ndarray], np.ndarray],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
) -> np.ndarray:
    """Attention in float64 with the given way from logits to weights.

    Args:
        weights: one of the functions below, from logits (B, H, T, N) to weights of that shape.
        q: (B, H, T, D).
        k: (B, Hkv, N, D), N >= T; the queries are the last T positions.
        v: (B, Hkv, N, D).
        scale: multiplies the logits.

    Returns:
        (B, H, T, D), float64.
    """
    group = q.shape[1] // k.shape[1]
    return weights(logits(q, k, scale)) @ np.repeat(v.astype(np.float64), group, axis=1)


def logits(q: np.ndarray, k: np.ndarray, scale: float) -> np.ndarray:
    """scale q k^T, (B, H, T, N), float64; k (B, Hkv, N, D)."""
    k = np.repeat(k.astype(np.float64), q.shape[1] // k.shape[1], axis=1)
    return scale * np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k)


def softmax(z: np.ndarray) -> np.ndarray:
    """Weights of causal softmax attention."""
    T, N = z.shape[-2:]
    z = np.where(np.tri(T, N, k=N - T, dtype=bool), z, -np.inf)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def selected(z: np.ndarray) -> np.ndarray:
    """S of selective attention, (B, T, N): what head 0 of each query makes later ones forget."""
    T, N = z.shape[-2:]
    S = np.tril(np.maximum(z[:, 0], 0), N - T - 1)
    S[..., 0] = 0
    return S


def selective(z: np.ndarray, F: np.ndarray | float = 0) -> np.ndarray:
    """Weights of selective attention; F (B, 1, N) is what earlier queries left on the keys."""
    S = selected(z)
    F = F + np.cumsum(S, axis=1) - S
    return softmax(z - F[:, None])


def stick_breaking(z: np.ndarray) -> np.ndarray:
    """Weights of stick-breaking attention over earlier keys."""
    seen, softplus = _broken(z)
    nearer = np.cumsum(softplus[..., ::-1], axis=-1)[..., ::-1]
    return np.where(seen, np.exp(z - nearer), 0)


def remainder(z: np.ndarray) -> np.ndarray:
    """What stick-breaking attention over earlier keys leaves of each query's stick, (B, H, T)."""
    return np.exp(-_broken(z)[1].sum(-1))


def _broken(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which keys a query sees, and -log(1 - beta) of these."""
    T, N = z.shape[-2:]
    seen = np.tri(T, N, k=N - T - 1, dtype=bool)
    return seen, np.where(seen, np.logaddexp(0, z), 0)
