"""`mlxsup completion`: lets a shell complete commands and model names."""

from __future__ import annotations

import click

from ..connection import output_options
from ..terminal.output import Output

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@output_options
def completion(shell: str, output: Output) -> None:
    """Example: source <(mlxsup completion bash)

    Prints the script that makes SHELL complete commands, options and model names. For fish:
    mlxsup completion fish | source
    """
    from click.shell_completion import get_completion_class

    from ..main import COMPLETE_VARIABLE, PROGRAM, root

    kind = get_completion_class(shell)
    assert kind is not None, shell
    # Not its `source`: bash's runs bash to find its version.
    made = kind(root, {}, PROGRAM, COMPLETE_VARIABLE)
    script = made.source_template % made.source_vars()
    output.result({"shell": shell, "script": script}, script)
