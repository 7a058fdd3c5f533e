"""The oracle: each method as its paper writes it, in NumPy float64, one query at a time.

Nothing here is fast or clever, and nothing here imports the package.
"""

import math

import numpy as np


def repeat_heads(kv: np.ndarray, heads: int) -> np.ndarray:
    """(B, Hkv, N, D) -> (B, H, N, D): query head h reads key head h // (H / Hkv)."""
    return np.repeat(kv, heads // kv.shape[1], axis=1)


def softmax(z: np.ndarray) -> np.ndarray:
    e = np.exp(z - z.max())
    return e / e.sum()


def causal_softmax(q, k, v, scale):
    """Ordinary attention: the whole sequence, (B, H, T, D)."""
    k, v = repeat_heads(k, q.shape[1]), repeat_heads(v, q.shape[1])
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, i in np.ndindex(*q.shape[:3]):
        out[b, h, i] = softmax(scale * k[b, h, : i + 1] @ q[b, h, i]) @ v[b, h, : i + 1]
    return out


def selective(q, k, v, scale, gain=1.0, before=None):
    """Selective attention of whole sequences; also F, (B, T, T): F[b, i, j] seen by query i.

    What head 0 selects is multiplied by ``gain``; ``before`` (B, T) is what F begins with.
    """
    B, H, T, _ = q.shape
    k, v = repeat_heads(k, H), repeat_heads(v, H)
    out, F = np.zeros((B, H, T, v.shape[3])), np.zeros((B, T, T))
    for b in range(B):
        accumulated = np.zeros(T) if before is None else before[b].copy()
        for i in range(T):
            F[b, i] = accumulated
            for h in range(H):
                z = scale * k[b, h, : i + 1] @ q[b, h, i]
                out[b, h, i] = softmax(z - accumulated[: i + 1]) @ v[b, h, : i + 1]
            for j in range(1, i):  # not the first token, not itself
                accumulated[j] += gain * max(0.0, scale * float(q[b, 0, i] @ k[b, 0, j]))
    return out, F


def selective_results(q, k, v, scale, **options):
    """The output, F after the last query (B, T), and what each query needs (B, T), tau = 1."""
    out, F = selective(q, k, v, scale, **options)
    last, T = F[:, -1].copy(), q.shape[2]
    for b, j in np.ndindex(len(q), T):
        if 0 < j < T - 1:
            z = scale * float(q[b, 0, -1] @ k[b, 0, j])
            last[b, j] += options.get("gain", 1.0) * max(0.0, z)
    return out, last, np.tril(1 - np.minimum(F, 1)).sum(axis=-1)


def selective_pruned(q, k, v, scale, budget, chunks):
    """Selective attention under a budget, the sequence coming in chunks.

    All queries of a chunk see every kept key and the chunk's own; then those with the largest F
    leave down to the budget, ties going to the oldest, the first and the newest staying.

    Returns the output (B, H, T, Dv), the kept positions of each row in order, and their F.
    """
    B, H, T, _ = q.shape
    k, v = repeat_heads(k, H), repeat_heads(v, H)
    out = np.zeros((B, H, T, v.shape[3]))
    kept_rows, F_rows = [], []
    for b in range(B):
        kept, F, seen = [], {}, 0
        for chunk in chunks:
            live = kept + list(range(seen, seen + chunk))
            for i in range(seen, seen + chunk):
                visible = [j for j in live if j <= i]
                f = np.array([F.get(j, 0.0) for j in visible])
                for h in range(H):
                    z = scale * k[b, h, visible] @ q[b, h, i]
                    out[b, h, i] = softmax(z - f) @ v[b, h, visible]
                for j in visible:
                    if 0 < j < i:
                        F[j] = F.get(j, 0.0) + max(0.0, scale * float(q[b, 0, i] @ k[b, 0, j]))
            seen += chunk
            kept = live
            while budget is not None and len(kept) > budget:
                candidates = [j for j in kept if 0 < j < seen - 1]
                kept = [j for j in kept if j != max(candidates, key=lambda j: (F.get(j, 0.0), -j))]
        kept_rows.append(kept)
        F_rows.append([F.get(j, 0.0) for j in kept])
    return out, np.array(kept_rows), np.array(F_rows)


def stick_breaking(q, k, v, scale, attend_current=False):
    """Stick-breaking in its product form; also the remainder (B, H, T)."""
    B, H, T, _ = q.shape
    k, v = repeat_heads(k, H), repeat_heads(v, H)
    out, remainder = np.zeros((B, H, T, v.shape[3])), np.ones((B, H, T))
    for b, h, i in np.ndindex(B, H, T):
        left = 1.0
        for j in range(i if attend_current else i - 1, -1, -1):
            z = scale * float(q[b, h, i] @ k[b, h, j])
            # both shares from a non-positive exponent, so that neither overflows
            e = np.exp(-abs(z))
            beta, rest = (1 / (1 + e), e / (1 + e)) if z > 0 else (e / (1 + e), 1 / (1 + e))
            out[b, h, i] += left * beta * v[b, h, j]
            left *= rest
        remainder[b, h, i] = left
    return out, remainder


def ssa(q, k, v, query_temperature, value_temperature, scale):
    """SSA: temperatures (B, H, T) and (B, Hkv, T) multiply queries and values."""
    return causal_softmax(
        q * query_temperature[..., None], k, v * value_temperature[..., None], scale
    )


def ssa_temperature(x, weight, alpha, positions):
    """tanh(W x) + 1 + sigmoid(alpha) ln n, (B, H, T); x (B, T, C), n = position + 1."""
    token = np.tanh(np.einsum("btc,hc->bht", x, weight))
    growth = 1 / (1 + np.exp(-alpha))
    return token + 1 + growth[None, :, None] * np.log(positions + 1)[None, None]


def tiled_heads(kv: np.ndarray, heads: int) -> np.ndarray:
    """(B, Hkv, N, D) -> (B, H, N, D): query head h reads key head h % Hkv."""
    return np.tile(kv, (1, heads // kv.shape[1], 1, 1))


def stick_breaking_heads(q, k, v, scale, form, *parameters, tiled=False, attend_current=False):
    """Stick-breaking with its remainder, and the heads normalised, (B, H, T, Dv).

    ``parameters``: (head_bias,) for the form "head_bias"; (head_bias, weight, bias), the last two
    over the joined heads, for "head_bias_norm".
    """
    k, v = ((tiled_heads if tiled else repeat_heads)(kv, q.shape[1]) for kv in (k, v))
    out, remainder = stick_breaking(q, k, v, scale, attend_current)
    for b, h, i in np.ndindex(*out.shape[:3]):
        if form == "value":
            out[b, h, i] += remainder[b, h, i] * v[b, h, i]
        elif form != "none":
            out[b, h, i] += remainder[b, h, i] * parameters[0][h]
        if form == "head_bias_norm":
            size = v.shape[3]
            own = slice(h * size, (h + 1) * size)
            x = out[b, h, i] - out[b, h, i].mean()
            x /= np.sqrt((x**2).mean() + 1e-5)
            out[b, h, i] = x * parameters[1][own] + parameters[2][own]
    return out


def ssa_tau(
    x, projected, counts, token_map="none", weight=None, hidden=None, alpha=None, beta=None
):
    """One temperature of SSA, (B, H, T): 1 + token part + position part.

    Args: x (B, T, C), the layer's input; projected (B, H, T, D), before RoPE; counts (B, T), the
    visible keys. The position part has the form whose parameter is there.
    """

    def gelu(z):
        return np.array([u * (1 + math.erf(u / math.sqrt(2))) / 2 for u in z])

    tau = np.ones(projected.shape[:3])
    for b, h, t in np.ndindex(*tau.shape):
        if token_map == "linear":
            tau[b, h, t] += np.tanh(weight[h] @ x[b, t])
        elif token_map == "mlp":
            tau[b, h, t] += np.tanh(weight[h] @ gelu(hidden @ x[b, t]))
        elif token_map == "weight_sharing":
            tau[b, h, t] += np.tanh(weight[h] @ gelu(projected[b, h, t]))
        elif token_map == "feature_sharing":
            tau[b, h, t] += np.tanh(weight @ projected[b, h, t])
        if alpha is not None:
            tau[b, h, t] += np.log(counts[b, t]) / (1 + np.exp(-alpha[h]))
        if beta is not None:
            tau[b, h, t] += np.log(counts[b, t]) * np.exp(-np.exp(beta))
    return tau


def rope(x, dims, base):
    """x (B, H, T, D) with its first ``dims`` numbers turned, the first half against the second."""
    out, half = x.copy(), dims // 2
    for t, i in np.ndindex(x.shape[2], half):
        angle = t * base ** (-2 * i / dims)
        a, b = x[:, :, t, i], x[:, :, t, i + half]
        out[:, :, t, i] = a * np.cos(angle) - b * np.sin(angle)
        out[:, :, t, i + half] = b * np.cos(angle) + a * np.sin(angle)
    return out
