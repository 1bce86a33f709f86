"""The engine over mlx-lm; the only importer of MLX."""
