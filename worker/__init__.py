"""The child process: one MLX thread, one engine, a step loop."""
