"""Models on disk: which folders hold them, what each folder is, and what it says of its model."""
