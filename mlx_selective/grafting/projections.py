"""Whether a layer shows its queries and keys before RoPE, where shared token maps read them."""

import mlx.core as mx
import mlx.nn as nn

from ..attention import AttentionShape
from .attention_code import AttentionCode


class _Probe:
    """Stands where the layer's call will be; the first array that is turned may get a mark."""

    def __init__(self, mark_first: bool):
        self.mark_first = mark_first
        self.turned, self.position_read = [], False

    @property
    def offset(self):
        self.position_read = True
        return 0

    def rotate(self, rope, x, *args, **kwargs):
        self.turned.append(x.shape)
        # The mark is a second row in the batch: it shows without anything being evaluated.
        return mx.concatenate([x, x]) if self.mark_first and len(self.turned) == 1 else x

    def update_and_fetch(self, keys, values):
        return keys, values

    def attend(self, queries, keys, values, scale):
        self.queries_marked = len(queries) == 2 and len(keys) == 1
        return mx.zeros((1, *queries.shape[1:3], values.shape[3]), queries.dtype)


def shows_projections(attention: nn.Module, shape: AttentionShape) -> bool:
    """Whether whole queries, then whole keys, are turned by the layer's ``rope``, or none at all.

    Args:
        attention: mlx-lm's attention module, which has passed graft's own trial run.
        shape: its sizes.
    """
    # One token and several: decoding is code of its own in some families.
    return all(_shows(attention, shape, length) for length in (1, 2))


def _shows(attention: nn.Module, shape: AttentionShape, length: int) -> bool:
    probe = _run(attention, shape.features, length, mark_first=False)
    if not probe.turned:
        # A position that is read, though not by rope, turns queries out of sight.
        return not probe.position_read
    whole = [(1, heads, length, shape.head_size) for heads in (shape.heads, shape.key_heads)]
    if probe.turned != whole:
        return False
    try:
        return _run(attention, shape.features, length, mark_first=True).queries_marked
    except Exception:  # whatever foreign code makes of the mark
        return False


def _run(attention: nn.Module, features: int, length: int, *, mark_first: bool) -> _Probe:
    probe, code = _Probe(mark_first), AttentionCode(type(attention))
    x = mx.zeros((1, length, features))
    code.run(probe, code.bind(attention, (x,), code.extra_arguments()))
    return probe
