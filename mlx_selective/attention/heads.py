"""What all methods share: shapes, and query heads that share key heads."""

from functools import lru_cache

import mlx.core as mx


def check_heads(q: mx.array, k: mx.array, v: mx.array) -> None:
    """Checks that q (B, H, T, D), k (B, Hkv, N, D) and v (B, Hkv, N, Dv) belong together.

    Raises:
        ValueError: naming the arrays and what does not fit.
    """
    wrong = _what_is_wrong(q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    if wrong:
        raise ValueError(wrong)


# kept: a model asks the same for every layer and token
@lru_cache(maxsize=1024)
def _what_is_wrong(q, k, v, *dtypes) -> str:
    """What does not fit of three shapes and three dtypes; "" if all does."""
    if not all(mx.issubdtype(dtype, mx.floating) for dtype in dtypes):
        return "q, k and v must be floating, got {}, {} and {}.".format(*dtypes)
    if not len(q) == len(k) == len(v) == 4:
        return f"q, k and v need four axes (batch, heads, length, head size); got {q}, {k} and {v}."
    if k[:3] != v[:3]:
        return f"k {k} and v {v} differ in batch, heads or length."
    if q[0] != k[0] or q[3] != k[3]:
        return f"q {q} and k {k} differ in batch or head size."
    if q[1] % k[1]:
        return (
            f"{q[1]} query heads cannot share {k[1]} key heads; "
            "the first must be a multiple of the second."
        )
    if not 1 <= q[2] <= k[2]:
        return (
            f"{q[2]} queries need at least one and at most as many as the {k[2]} keys "
            "(their own keys are among them)."
        )
    return ""


def head_logits(q: mx.array, k: mx.array) -> mx.array:
    """Logits z = q k^T in float32, of queries that are scaled already.

    Heads that share a key head are stacked along the queries, so no key is repeated.

    Args:
        q: (B, H, T, D), any floating dtype.
        k: (B, Hkv, N, D); query head h reads key head h // (H / Hkv).

    Returns:
        (B, H, T, N), float32.
    """
    B, H, T, D = q.shape
    Hkv, N = k.shape[1:3]
    stacked = q.astype(mx.float32).reshape(B, Hkv, (H // Hkv) * T, D)
    return (stacked @ k.astype(mx.float32).swapaxes(-1, -2)).reshape(B, H, T, N)


def weigh_values(weights: mx.array, v: mx.array) -> mx.array:
    """Sums values under attention weights, in float32.

    Args:
        weights: (B, H, T, N), float32.
        v: (B, Hkv, N, Dv), any floating dtype.

    Returns:
        (B, H, T, Dv), float32.
    """
    B, H, T, N = weights.shape
    Hkv = v.shape[1]
    stacked = weights.reshape(B, Hkv, (H // Hkv) * T, N)
    return (stacked @ v.astype(mx.float32)).reshape(B, H, T, v.shape[3])


def masked_softmax(z: mx.array, visible: mx.array) -> mx.array:
    """Softmax over the visible keys; a query that sees none gets zeros, not NaN.

    Args:
        z: logits (B, H, T, N), float32.
        visible: broadcastable to z, bool.

    Returns:
        (B, H, T, N), float32.
    """
    z = mx.where(visible, z, mx.finfo(mx.float32).min)
    return mx.where(visible, mx.softmax(z, axis=-1), 0)


def untile_heads(x: mx.array, key_heads: int) -> mx.array:
    """Brings tiled query heads together by the key head they share.

    Args:
        x: (B, H, ...); head h belongs to key head h % key_heads.
        key_heads: Hkv, which divides H.

    Returns:
        (B, H, ...); head h belongs to key head h // (H / Hkv), as everywhere else here.
    """
    batch, heads, *rest = x.shape
    x = x.reshape(batch, heads // key_heads, key_heads, *rest)
    return x.swapaxes(1, 2).reshape(batch, heads, *rest)


def tile_heads(x: mx.array, key_heads: int) -> mx.array:
    """Takes back :func:`untile_heads`: (B, H, ...) to (B, H, ...)."""
    return untile_heads(x, x.shape[1] // key_heads)
