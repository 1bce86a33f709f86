"""The processes of the workers: spawned, measured, ended, and cleared away after a crash."""
