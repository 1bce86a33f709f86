"""One model's worker: its states, what can happen to it, and the rules that join the two."""
