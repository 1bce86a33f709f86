"""Hours of ordinary use: nothing may grow (J4)."""
