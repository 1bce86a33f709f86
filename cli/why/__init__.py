"""The record of a daemon in plain words: what `mlxsup why` says."""
