"""One model's worker: its states, what can happen to it, and what follows in each."""
