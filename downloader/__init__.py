"""Downloads one model repository, in a process of its own: the only importer of huggingface_hub."""
