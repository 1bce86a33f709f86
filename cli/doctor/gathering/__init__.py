"""Asks the machine for the facts that the checks judge."""
