"""Tiny random models of every model type of mlx-lm, and what is tried on them."""
