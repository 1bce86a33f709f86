"""The version of mlxsup, and of the wire format, that this code speaks."""

VERSION = "0.1.0"

PROTOCOL_VERSION = 2
"""Incremented when a message changes so that an older peer would misread it."""
