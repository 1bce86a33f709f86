"""The name of a file that a command creates."""

from __future__ import annotations

from pathlib import Path

import click


class NewFile(click.Path):
    """A path, but not `-`: what else these commands print goes to standard output."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Path:
        """Return the path.

        Raises:
            click.BadParameter: it is `-`.
        """
        if value == "-":
            self.fail("- stands for standard output; name a file instead", param, ctx)
        return Path(super().convert(value, param, ctx))  # type: ignore[arg-type]
