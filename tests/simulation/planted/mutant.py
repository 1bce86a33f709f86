"""One bug that the simulation has to see."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug.

    Attributes:
        name: what is broken, as the list prints it.
        module: of the core.
        right, wrong: the text, and what is put in the place of its first occurrence.
    """

    name: str
    module: str
    right: str
    wrong: str

    def plant(self, source: str) -> str:
        """The module's text with the bug.

        Raises:
            LookupError: the text is not there: this list is out of date.
        """
        if self.right not in source:
            raise LookupError(f"{self.name}: {self.module} does not contain {self.right!r}")
        return source.replace(self.right, self.wrong, 1)


def bug(name: str, module: str, right: str, wrong: str) -> Mutant:
    """A bug, in short."""
    return Mutant(name=name, module=module, right=right, wrong=wrong)
