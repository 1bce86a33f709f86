"""An engine without a model: deterministic answers, and faults on demand."""
