"""How other programs get to use a daemon: what goes into which of their files, and back."""
