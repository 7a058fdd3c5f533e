"""Stick-breaking attention (arXiv 2410.17980). The mathematics: README.md in this folder."""

from .definition import bias_remainder, normalise_heads, stick_breaking_attention, value_remainder
from .layer import StickBreaking

__all__ = [
    "StickBreaking",
    "bias_remainder",
    "normalise_heads",
    "stick_breaking_attention",
    "value_remainder",
]
