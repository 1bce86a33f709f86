"""Requests: the ledger of the open ones, the gate they pass, and the queue they wait in."""
