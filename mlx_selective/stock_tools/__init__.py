"""mlx-lm's own tools as commands of this package, opening models without their folder's code."""
