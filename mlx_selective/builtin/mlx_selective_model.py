"""Lets stock mlx-lm open this folder (--trust-remote-code)."""

from mlx_selective.model import Model, ModelArgs  # noqa: F401
