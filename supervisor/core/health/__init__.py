"""Whether a worker makes progress, why one died, and which request is to blame."""
