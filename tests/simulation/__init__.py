"""A simulation of the supervisor's core: virtual time, seeded faults, invariants at every event."""
