"""Whether the user has forbidden to ask a model hub."""

from __future__ import annotations

import os

VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
YES = {"1", "ON", "YES", "TRUE"}


def is_offline() -> bool:
    """By the variables and the words that huggingface_hub takes."""
    return any(os.environ.get(name, "").upper() in YES for name in VARIABLES)
