"""Selective self-attention, SSA (arXiv 2411.12892). The mathematics: README.md in this folder."""

from .definition import (
    apply_temperature,
    feature_sharing_temperature,
    mlp_temperature,
    position_temperature,
    released_position_temperature,
    ssa_attention,
    token_temperature,
    weight_sharing_temperature,
)
from .layer import SSA
from .temperature import Temperature

__all__ = [
    "SSA",
    "Temperature",
    "apply_temperature",
    "feature_sharing_temperature",
    "mlp_temperature",
    "position_temperature",
    "released_position_temperature",
    "ssa_attention",
    "token_temperature",
    "weight_sharing_temperature",
]
