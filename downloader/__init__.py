"""Downloads one model repository, in a separate process: the only importer of huggingface_hub."""
