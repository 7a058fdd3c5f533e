"""How many keys each layer keeps: found by trying, stored in the model, drawn as a curve."""

from .allocation import allocate
from .measure import mean_loss

__all__ = ["allocate", "mean_loss"]
