"""Fine-tuning: mlx-lm's trainer, with what the attention methods need of it."""
