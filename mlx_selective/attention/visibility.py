"""Which keys a query may see: causality, masks, and documents packed into one sequence."""

import mlx.core as mx


def document_positions(segment_ids: mx.array) -> mx.array:
    """Position of each token within its own document.

    Documents that are packed into one sequence are runs of equal ids; a run that comes back
    later is a new document.

    Args:
        segment_ids: (N,) or (B, N), integers, one id a token.

    Returns:
        (B, N) int32, B = 1 for one row; 0 for the first token of a document.
    """
    segment_ids = mx.atleast_2d(segment_ids)
    index = mx.broadcast_to(mx.arange(segment_ids.shape[1]), segment_ids.shape)
    begins = mx.concatenate(
        [mx.ones_like(segment_ids[:, :1], mx.bool_), segment_ids[:, 1:] != segment_ids[:, :-1]],
        axis=1,
    )
    return index - mx.cummax(mx.where(begins, index, 0), axis=1)


def _check_segment_ids(segment_ids: mx.array, batch: int, keys: int) -> None:
    """Raises ValueError unless there is one integer id for each key."""
    if not mx.issubdtype(segment_ids.dtype, mx.integer) or segment_ids.shape not in (
        (keys,),
        (1, keys),
        (batch, keys),
    ):
        raise ValueError(
            f"segment_ids must be integers, one for each of {keys} keys in each of {batch} rows; "
            f"got {segment_ids.shape} {segment_ids.dtype}."
        )


class Visibility:
    """Which keys the queries of a sequence see, asked for one block of queries at a time.

    The queries are the last ``queries`` of the ``keys``, in order; none sees a later key.

    Args:
        batch: B.
        queries, keys: T and N.
        own_key: whether a query sees its own key.
        mask: bool, broadcastable to (B, H, T, N); False takes keys away.
        segment_ids: (N,) or (B, N); a query sees the keys of its own document only.

    Raises:
        ValueError: if segment_ids does not fit the keys.
    """

    def __init__(self, batch, queries, keys, *, own_key=True, mask=None, segment_ids=None):
        self.own_key = own_key
        self.first_own = keys - queries
        self.mask = mask
        if mask is not None:
            # broadcast on its last two axes only: a row of padding has no query axis to cut
            shape = (*mask.shape[:-2], queries, keys) if mask.ndim > 1 else (queries, keys)
            self.mask = mx.broadcast_to(mask, shape)
        self.document_starts = None
        if segment_ids is not None:
            _check_segment_ids(segment_ids, batch, keys)
            self.document_starts = mx.arange(keys) - document_positions(segment_ids)

    @property
    def causal_only(self) -> bool:
        """Whether there is nothing but causality."""
        return self.mask is None and self.document_starts is None

    def of_block(self, start: int, end: int, reach: int) -> mx.array:
        """Bool, broadcastable to (B, H, end - start, reach), for queries ``start`` to ``end``."""
        own = self.first_own + mx.arange(start, end)[:, None]
        key = mx.arange(reach)
        visible = key <= own if self.own_key else key < own
        if self.document_starts is not None:
            begin, stop = self.first_own + start, self.first_own + end
            starts = self.document_starts[:, begin:stop]
            visible = visible & (key >= starts[:, None, :, None])
        if self.mask is not None:
            visible = visible & self.mask[..., start:end, :reach]
        return visible
