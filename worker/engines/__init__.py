"""The engines: one over mlx-lm, and one without a model for tests and demonstrations."""
