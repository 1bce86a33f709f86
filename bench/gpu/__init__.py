"""The rows of `bench.fast_path` that need a GPU, in one script that continues where it stopped."""
