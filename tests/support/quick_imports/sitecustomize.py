"""For PYTHONPATH: every process that the tests start imports transformers quickly."""

import importlib

importlib.import_module("transformers_index").install()
