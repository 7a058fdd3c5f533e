"""Ordinary causal softmax attention, through the same graft as the other methods."""

from dataclasses import dataclass

from mlx_lm.models.base import scaled_dot_product_attention

from ..method import AttentionMethod, LayerCall


class SoftmaxCall(LayerCall):
    """mlx-lm's own attention, to the last bit."""

    def attend(self, queries, keys, values, scale):
        return scaled_dot_product_attention(
            queries, keys, values, cache=self.cache, scale=scale, mask=self.mask
        )


@dataclass(frozen=True)
class Softmax(AttentionMethod):
    """Ordinary attention: the baseline, and what a layer keeps when nothing is grafted."""

    kind = "softmax"
    call = SoftmaxCall
