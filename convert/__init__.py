"""From a PyTorch checkpoint to a model folder: safe reading, one weight map per layout."""

from .pipeline import convert

__all__ = ["convert"]
