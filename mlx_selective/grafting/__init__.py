"""mlx-lm's own model with another attention in it, and what stands against that."""

from .departures import correct_family
from .grafted_model import GraftedModel, graft
from .refusals import refuse_config

__all__ = ["GraftedModel", "correct_family", "graft", "refuse_config"]
