"""For PYTHONPATH: every process that the tests start imports transformers quickly."""

import transformers_index

transformers_index.install()
