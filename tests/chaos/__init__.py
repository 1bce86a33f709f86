"""Real processes under faults, with a ledger of what was asked and what came (P1)."""
