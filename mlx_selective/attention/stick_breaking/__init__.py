"""Stick-breaking attention (arXiv 2410.17980). The mathematics: README.md in this folder."""

from .definition import stick_breaking_attention
from .layer import StickBreaking

__all__ = ["StickBreaking", "stick_breaking_attention"]
