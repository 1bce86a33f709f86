"""A model folder and names made by somebody who wants to steer the terminal of who reads them."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

from support.models.tiny_model import make_tiny_model

WORD = "PWNED"
"""Shows that a hostile text was written, however it was neutralised."""

EVIL = f"\x1b]0;{WORD}\x07\x1b[2J\x9b35m\u202e\u2066\u200f\u061c\U000e0041\x7f\x85\x08\x1b[35m\x1bc"
"""A title, a cleared screen, colours, a reset and an order of reading; nothing ends a line."""

OWN = re.compile(
    r"\x1b\[(?:0|1|2|4|7|22|31|32|33|36)?(?:;(?:1|2|7|31|32|33))*m"
    r"|\x1b\[0;38;5;102m|\x1b\[\?(?:1|7|12)[hl]|\x08(?=\x1b\[(?:2C|\d+A))"  # of prompt_toolkit
    r"|\r?\x1b\[(?:\d+A\r?|K|J|H)|\r"
    r"|\x1b\[\?(?:1049|25|2004)[hl]|\x1b\[\d*[CDP@]"
)
"""What `Output`, prompt_toolkit and readline write."""


def acting(seen: str) -> list[str]:
    """What a terminal would act on, besides our own sequences and line breaks."""
    left = OWN.sub("", seen)
    kinds = ("Cc", "Cf", "Zl", "Zp")
    return [c for c in left if unicodedata.category(c) in kinds and c not in "\n\t"]


def unknown_type(folder: Path) -> Path:
    """A model whose type is hostile: it cannot be loaded."""
    return make_tiny_model(folder, config={"model_type": EVIL, "architectures": [EVIL]})


def raising_template(folder: Path) -> Path:
    """A model that loads, and whose chat template refuses each conversation in hostile words.

    Its text has half a surrogate pair, too, which no message between processes can contain.
    """
    make_tiny_model(folder)
    path = folder / "tokenizer_config.json"
    value = json.loads(path.read_text())
    value["chat_template"] = "{{ raise_exception(" + json.dumps(f"{EVIL}\ud800") + ") }}"
    path.write_text(json.dumps(value))
    return folder
