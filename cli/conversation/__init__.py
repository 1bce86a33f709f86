"""A chat: what was said, the commands that begin with a slash, and the file that keeps it."""
