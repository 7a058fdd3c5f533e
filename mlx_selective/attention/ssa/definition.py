"""Selective self-attention (SSA): temperatures on queries, keys and values, then stock attention.

Zhang, Chang, Li, Oymak: Selective Attention: Enhancing Transformer through Principled Context
Control, arXiv 2411.12892. Its public code (umich-sota/selective_attention) holds only the
position-aware temperature, in the form that ``released_position_temperature`` gives; how the
paper wires weight sharing is not public, so the shared parts here are a reading of its words.
"""

import mlx.core as mx
import mlx.nn as nn

from ... import kernels
from ..blocks import QUERY_BLOCK, scan_queries
from ..heads import check_heads
from ..visibility import Visibility


def token_temperature(x: mx.array, weight: mx.array) -> mx.array:
    """Token-aware part without sharing, tanh(W x): what a token's own content asks for.

    Args:
        x: (B, T, C), the attention layer's input.
        weight: W (H, C), one row per head.

    Returns:
        (B, H, T), float32, between -1 and 1.
    """
    product = x.astype(mx.float32) @ weight.astype(mx.float32).T
    return mx.tanh(product).swapaxes(1, 2)


def mlp_temperature(x: mx.array, hidden: mx.array, weight: mx.array) -> mx.array:
    """Token-aware part with two layers of its own, tanh(W2 gelu(W1 x)).

    Args:
        x: (B, T, C), the attention layer's input.
        hidden: W1 (M, C).
        weight: W2 (H, M), one row per head.

    Returns:
        (B, H, T), float32, between -1 and 1.
    """
    return token_temperature(nn.gelu(x.astype(mx.float32) @ hidden.astype(mx.float32).T), weight)


def weight_sharing_temperature(projected: mx.array, weight: mx.array) -> mx.array:
    """Token-aware part whose first layer is the attention's own projection, tanh(w_h . gelu(p_h)).

    Args:
        projected: p (B, H, T, D), queries, keys or values before RoPE, with any bias and norm.
        weight: w (H, D), one row per head.

    Returns:
        (B, H, T), float32, between -1 and 1.
    """
    features = nn.gelu(projected.astype(mx.float32))
    return mx.tanh((features @ weight.astype(mx.float32)[..., None])[..., 0])


def feature_sharing_temperature(projected: mx.array, weight: mx.array) -> mx.array:
    """Token-aware part read off the projection by one vector for all heads, tanh(w . p_h).

    Args:
        projected: p (B, H, T, D), as in :func:`weight_sharing_temperature`.
        weight: w (D,).

    Returns:
        (B, H, T), float32, between -1 and 1.
    """
    return mx.tanh(projected.astype(mx.float32) @ weight.astype(mx.float32))


def position_temperature(count: mx.array, alpha: mx.array) -> mx.array:
    """Position-aware part, 1 + sigmoid(alpha) ln n: longer contexts need sharper attention.

    Args:
        count: (T,) or (B, T), n = number of keys visible to each query, 1 for the first token.
        alpha: (H,), one number per head.

    Returns:
        (1, H, T) or (B, H, T), float32.
    """
    growth = mx.sigmoid(alpha.astype(mx.float32))[:, None]
    return 1 + growth * _log_count(count)


def released_position_temperature(count: mx.array, beta: mx.array) -> mx.array:
    """The form in the authors' released code: 1 + exp(-exp(beta)) ln n, one beta a layer.

    Args:
        count: (T,) or (B, T), n as in :func:`position_temperature`.
        beta: (), one number.

    Returns:
        (1, 1, T) or (B, 1, T), float32.
    """
    return 1 + mx.exp(-mx.exp(beta.astype(mx.float32))) * _log_count(count)


def _log_count(count: mx.array) -> mx.array:
    """ln n as (B or 1, 1, T)."""
    log = mx.log(count.astype(mx.float32))
    return log[None, None] if log.ndim == 1 else log[:, None]


def apply_temperature(x: mx.array, temperature: mx.array | None) -> mx.array:
    """Multiplies each row of x (B, H, T, D) by its temperature (B, H, T) or (B, H, T, 1).

    The product is formed in float32 and returned in x's dtype: by a kernel where one applies
    (metal/ssa/temperature.metal), by :func:`multiply_rows` otherwise.

    Temperatures multiply (they are inverse temperatures in the physicist's sense). A scalar
    per query or key commutes with RoPE, but not with a norm: apply it after those.
    """
    if temperature is None:
        return x
    if temperature.ndim < x.ndim:
        temperature = temperature[..., None]
    tempered = kernels.ssa_temperature(x, temperature, plain=multiply_rows)
    return multiply_rows(x, temperature) if tempered is None else tempered


def multiply_rows(x: mx.array, temperature: mx.array) -> mx.array:
    """The definition of :func:`apply_temperature`, in plain MLX.

    Args:
        x: (B, H, T, D).
        temperature: (B, H, T, 1), or broadcastable to it.

    Returns:
        (B, H, T, D), in x's dtype.
    """
    return (x.astype(mx.float32) * temperature).astype(x.dtype)


def ssa_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    query_temperature: mx.array | None,
    value_temperature: mx.array | None,
    *,
    scale: float,
    key_temperature: mx.array | None = None,
    mask: mx.array | None = None,
    segment_ids: mx.array | None = None,
    block_size: int = 8 * QUERY_BLOCK,
) -> mx.array:
    """Causal softmax attention of tempered queries over tempered keys and values.

    ``output = softmax(scale (tau_q q) (tau_k k)^T + causal) (tau_v v)`` with stock fused
    attention. A cache stores tempered keys and values; pass those with None for their
    temperatures.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16, after RoPE and any norm.
        k: (B, Hkv, N, D), N >= T; the queries are the last T positions.
        v: (B, Hkv, N, Dv).
        query_temperature: (B, H, T) or (B, H, T, 1), or broadcastable to it, or None for 1.
        value_temperature: (B, Hkv, N) or (B, Hkv, N, 1), or broadcastable to it, or None for 1.
        scale: multiplies the logits, usually D ** -0.5.
        key_temperature: as value_temperature, for k.
        mask: bool, broadcastable to (B, H, T, N); False takes keys away, such as padding. A query
            that sees no key gets some finite output. Causality holds in any case.
        segment_ids: (B, N) or (N,) integers, for documents packed into one sequence: runs of
            equal ids. A query sees its own document only. Temperatures are the caller's:
            :func:`~mlx_selective.attention.visibility.document_positions` counts anew.
        block_size: queries per block.

    Returns:
        (B, H, T, Dv) in q's dtype.

    Temperatures multiply in float32; the rest is MLX's own attention, which on the CPU rounds
    logits and weights to q's dtype. Peak memory beside inputs and outputs: where MLX has fused
    attention, the tempered copies of q, k and v; on the CPU, whose attention forms all logits of
    a block, also at most 5 L, with L = B * H * block_size * N * 4 bytes.

    Raises:
        ValueError: if shapes do not belong together.
    """
    check_heads(q, k, v)
    q = apply_temperature(q, query_temperature)
    k = apply_temperature(k, key_temperature)
    v = apply_temperature(v, value_temperature)

    visibility = Visibility(q.shape[0], q.shape[2], k.shape[2], mask=mask, segment_ids=segment_ids)

    def block(carry, q, k, v, start):
        allowed = "causal"
        if not visibility.causal_only:
            visible = visibility.of_block(start, start + q.shape[2], k.shape[2])
            # Added, not bool: MLX's CUDA backend spreads a bool mask over all heads. Half the
            # smallest number, so that no logit can take it to -inf (NaN where no key is seen).
            allowed = mx.where(visible, 0.0, mx.finfo(q.dtype).min / 2).astype(q.dtype)
        return [carry, mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=allowed)]

    nothing = mx.zeros((1,))
    return scan_queries(block, nothing, q, k, v, block_size=block_size)[1]
