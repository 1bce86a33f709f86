"""Sharing one machine: what requests cost, and who comes first."""
