"""The blocks of README, for the tests that run and check them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[3] / "README.md"


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        line: of its first fence, from 1.
        language: what stands behind that fence; may be empty.
        text: what is between the fences.
    """

    line: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell: lines with those that continue them, no comments."""
        joined = re.sub(r"\\\n\s*", "", self.text)
        return [re.sub(r"\s+# .*", "", line) for line in joined.splitlines() if line]


def blocks() -> list[Block]:
    """Every fenced block, in order."""
    text = README.read_text()
    return [
        Block(text[: found.start()].count("\n") + 1, found[1], found[2])
        for found in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    ]
