"""Stick-breaking attention: the definition in plain MLX, which also runs where no kernel applies.

Tan, Yang, Courville, Panda, Shen: Scaling Stick-Breaking Attention, arXiv 2410.17980. What
becomes of the remainder: github.com/IBM/dolomite-engine, models/stickbreaking/attention.py.
"""

import mlx.core as mx

from ...kernels.choice import FLOATS
from ...kernels.stick_breaking import stick_breaking
from ...kernels.stick_breaking_decode import stick_breaking_decode
from ..blocks import QUERY_BLOCK, scan_queries
from ..heads import check_heads, head_logits, weigh_values
from ..visibility import Visibility


def stick_breaking_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    attend_current: bool = False,
    mask: mx.array | None = None,
    segment_ids: mx.array | None = None,
    begins: mx.array | None = None,
    output_dtype: mx.Dtype | None = None,
    block_size: int = QUERY_BLOCK,
) -> tuple[mx.array, mx.array]:
    """Attention in which each query breaks a stick, from the newest key backwards.

    With z the logits and beta = sigmoid(z), query i at key j < i (j <= i with
    ``attend_current``) breaks off the share beta of what nearer keys have left::

        A[i, j]      = beta[i, j] * product over j < l < i of (1 - beta[i, l])
        output[i]    = sum of A[i, j] v[j]
        remainder[i] = product over all l < i of (1 - beta[i, l])

    so that the weights and the remainder sum to 1. There is no softmax and no position
    embedding. The first token of a sequence sees no key: its output is 0, its remainder 1.

    Args:
        q: (B, H, T, D), float32, float16 or bfloat16.
        k: (B, Hkv, N, D), oldest first, N >= T, H a multiple of Hkv. The queries' own keys
            are among them (attended to or not): the last T.
        v: (B, Hkv, N, Dv).
        scale: multiplies the logits, usually D ** -0.5.
        attend_current: whether a query's own key takes the first share.
        mask: bool, broadcastable to (B, H, T, N); False takes keys away, such as padding, which
            then breaks nothing off the stick. Causality holds in any case.
        segment_ids: (B, N) or (N,) integers, for documents packed into one sequence: runs of
            equal ids. A stick ends at the border of its document.
        begins: (B,) integers, the first key of each row that is not left padding; it may lie
            beyond the keys, in a row that is all padding so far. Kernels take it, as they do not
            take masks. A query that is padding itself has output 0 and remainder 1.
        output_dtype: float32, float16 or bfloat16; q's if None. float32 for an output to which
            more is added before it is rounded.
        block_size: queries per block, where no kernel runs.

    Returns:
        The output (B, H, T, Dv) and the remainder (B, H, T) in float32.

    Accumulation is in float32, in log space. Peak memory beside inputs and outputs, with L = B *
    H * block_size * N * 4 bytes for the logits of one block: q, k and v in float32, and at most
    12 L forward, 32 L backward on the CPU (up to four times that on a GPU, which frees later).

    Raises:
        ValueError: if shapes do not belong together, or a dtype is not as above.
    """
    check_heads(q, k, v)
    begins = _checked_begins(begins, q.shape[0])
    if output_dtype is not None and output_dtype not in FLOATS:
        raise ValueError(f"output_dtype must be one of {FLOATS} or None, got {output_dtype}.")
    if mask is None and segment_ids is None:
        results = _by_kernel(q, k, v, begins, scale, attend_current, output_dtype)
        if results is not None:
            return results
    return plain_stick_breaking(
        q,
        k,
        v,
        scale=scale,
        attend_current=attend_current,
        mask=mask,
        segment_ids=segment_ids,
        begins=begins,
        output_dtype=output_dtype,
        block_size=block_size,
    )


def _checked_begins(begins, rows):
    """In int32, as kernels read them."""
    if begins is None:
        return None
    if begins.shape != (rows,) or not mx.issubdtype(begins.dtype, mx.integer):
        raise ValueError(
            f"begins must be integers, one for each of {rows} rows; "
            f"got {begins.shape} {begins.dtype}."
        )
    return begins.astype(mx.int32)


def _by_kernel(q, k, v, begins, scale, attend_current, output_dtype):
    """The output and the remainder, or None where no kernel applies."""
    kernels = stick_breaking if q.shape[2] > 1 else stick_breaking_decode
    return kernels(
        *(q, k, v),
        scale=scale,
        definition=plain_stick_breaking,
        attend_current=attend_current,
        begins=begins,
        output_dtype=output_dtype,
    )


def plain_stick_breaking(
    q,
    k,
    v,
    *,
    scale,
    attend_current,
    mask=None,
    segment_ids=None,
    begins=None,
    output_dtype=None,
    block_size=QUERY_BLOCK,
):
    """:func:`stick_breaking_attention` in plain MLX, whatever kernels there are."""
    if begins is not None:
        real = mx.arange(k.shape[2]) >= begins[:, None, None, None]
        mask = real if mask is None else mask & real
    visibility = Visibility(
        q.shape[0],
        q.shape[2],
        k.shape[2],
        own_key=attend_current,
        mask=mask,
        segment_ids=segment_ids,
    )

    def block(carry, q, k, v, start):
        visible = visibility.of_block(start, start + q.shape[2], k.shape[2])
        return [carry, *_attend(q, k, v, visible)]

    scaled = q.astype(mx.float32) * scale
    k, v = k.astype(mx.float32), v.astype(mx.float32)
    # Every query breaks a fresh stick: a block hands nothing to the next.
    nothing = mx.zeros((1,))
    _, output, remainder = scan_queries(block, nothing, scaled, k, v, block_size=block_size)
    return output.astype(output_dtype or q.dtype), remainder


def _attend(q, k, v, visible):
    """One block of queries, scaled: its output and remainder."""
    z = head_logits(q, k)
    # log(1 - beta) = -softplus(z) and log(beta) = -softplus(-z) share one exponential. Not with
    # abs and maximum, whose gradients at z = 0 would cancel the whole of it.
    positive = z > 0
    tail = mx.log1p(mx.exp(mx.where(positive, -z, z)))
    log_left = mx.where(visible, -(mx.where(positive, z, 0) + tail), 0)
    log_beta = mx.where(positive, 0, z) - tail
    nearer = mx.cumsum(log_left, axis=-1, reverse=True, inclusive=False)
    A = mx.where(visible, mx.exp(log_beta + nearer), 0)
    # Not 1 - sum(A): that difference can come out negative.
    return weigh_values(A, v), mx.exp(log_left.sum(axis=-1))


def value_remainder(remainder: mx.array, v: mx.array) -> mx.array:
    """What is left of each stick goes to the token's own value: rem_i v_i.

    dolomite-engine 0296e23 (December 2024).

    Args:
        remainder: (B, H, T), float32.
        v: (B, Hkv, T, Dv), any floating dtype: the values of the queries' own tokens, that is,
            the last T of all. Query head h reads value head h // (H / Hkv).

    Returns:
        (B, H, T, Dv), float32, to be added to the output.
    """
    B, H, T = remainder.shape
    Hkv, Dv = v.shape[1], v.shape[3]
    grouped = remainder.reshape(B, Hkv, H // Hkv, T, 1) * v.astype(mx.float32)[:, :, None]
    return grouped.reshape(B, H, T, Dv)


def bias_remainder(remainder: mx.array, head_bias: mx.array) -> mx.array:
    """What is left of each stick goes to a learned vector of the head: rem_i r_h.

    dolomite-engine 32da568 (December 2024); the paper's "remainder bias".

    Args:
        remainder: (B, H, T), float32.
        head_bias: (H, Dv), any floating dtype.

    Returns:
        (B, H, T, Dv), float32, to be added to the output.
    """
    return remainder[..., None] * head_bias.astype(mx.float32)[:, None]


def normalise_heads(
    x: mx.array, weight: mx.array, bias: mx.array, *, eps: float = 1e-5
) -> mx.array:
    """PyTorch's GroupNorm(H, H * Dv) of each token: a head is a group of its own.

    dolomite-engine 46c0084 (January 2025), which feeds it the joined heads (B * T, H * Dv).

    Args:
        x: (B, H, T, Dv), any floating dtype.
        weight, bias: (H * Dv,), heads in order, any floating dtype.
        eps: added to the variance, which is the biased one.

    Returns:
        (B, H, T, Dv), float32.
    """
    heads, size = x.shape[1], x.shape[3]
    normal = mx.fast.layer_norm(x.astype(mx.float32), None, None, eps)
    weight, bias = (p.astype(mx.float32).reshape(heads, 1, size) for p in (weight, bias))
    return normal * weight + bias
