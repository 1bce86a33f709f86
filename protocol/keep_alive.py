"""The limits of `keep_alive`: how long a model stays loaded while it is idle."""

SHORTEST_LOAD_S = 0.001
"""A load that keeps the model for less would unload it at once."""
