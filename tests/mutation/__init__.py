"""Random small bugs, planted one at a time, and whether the fast tests notice each."""
