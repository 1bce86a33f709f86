"""Hostile bytes: at the decoder, and through the client socket of a real daemon (P17)."""
