"""Selective attention (arXiv 2410.02703). The mathematics: README.md in this folder."""

from .as_decoded import as_decoded
from .definition import selective_attention
from .layer import Selective

__all__ = ["Selective", "as_decoded", "selective_attention"]
