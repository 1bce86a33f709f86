"""`mlxsup convert`: makes a model folder out of a GGUF file, or of another folder."""

from __future__ import annotations

from pathlib import Path

import click

from ..connection import output_options
from ..terminal.output import Output

BITS = ("2", "3", "4", "5", "6", "8")
DEFAULT_BITS = 4


@click.command()
@click.argument("source")
@click.argument("target", type=click.Path(path_type=Path), required=False)
@click.option("--quantize", is_flag=True, help=f"Quantise the weights to {DEFAULT_BITS} bits.")
@click.option("--bits", type=click.Choice(BITS), help="Quantise to this many bits instead.")
@output_options
def convert(
    source: str, target: Path | None, quantize: bool, bits: str | None, output: Output
) -> None:
    """Example: mlxsup convert ~/Downloads/smollm2.gguf

    Converts SOURCE into a model folder that mlxsup can serve. SOURCE is a GGUF file of a llama
    model or, with --quantize, a configured model, a folder, or OWNER/NAME in the Hugging Face
    cache. TARGET is a new folder, by default in ~/.mlxsup/models. SOURCE is not changed.
    """
    from ..conversion import convert_model  # help would wait for it

    options = f" --bits {bits}" if bits is not None else " --quantize" * quantize
    chosen = int(bits) if bits is not None else DEFAULT_BITS if quantize else None
    convert_model(source, target, chosen, options, output)
