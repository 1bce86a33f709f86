"""How fast the path from a prompt to its tokens is: what is claimed, measured, kept and printed."""
