"""Benchmarks, run side by side with what they are compared to: `make bench`."""
