"""Measures a model through the daemon: for `mlxsup bench`, and for the benchmarks in bench/."""
