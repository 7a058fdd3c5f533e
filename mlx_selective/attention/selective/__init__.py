"""Selective attention (arXiv 2410.02703). The mathematics: README.md in this folder."""

from .definition import selective_attention
from .layer import Selective

__all__ = ["Selective", "selective_attention"]
