"""Converts a GGUF file or a model folder into a folder that is served: `mlxsup convert`.

`python -m mlxsup.worker.engines.mlx.conversion SOURCE FOLDER [BITS]` does it. A folder goes through
mlx-lm's own conversion. Standard output gets a line for each stage; errors and what libraries print
go to standard error.
"""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from mlx_lm.convert import convert as convert_folder

from mlxsup.protocol.launch import ExitCode

from ...engine import BadModelError, ModelMissingError
from . import gguf, limit_memory
from .folder import check_folder
from .gguf import Say
from .loader import MODEL_FAULTS, is_memory_text, shorten

GGUF_FACTOR = 8
"""Memory for each byte of a GGUF file: weights of two bits become 16, and some are copied once."""

GGUF_SPARE_BYTES = 4 * 2**30
"""For the libraries, the stacks of their threads and a vocabulary."""

STAGE = "[INFO] "
"""Begins the lines in which mlx-lm says what it does."""

INTERRUPTED = 130
UNWRITTEN = 1
"""The exit code if a file cannot be read or written."""


class Stages:
    """A text stream that passes on the stages that mlx-lm prints, and the rest to standard error.

    Args:
        say: called with each stage.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._rest = ""

    def write(self, text: str) -> int:
        """Takes a piece of what is printed."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.startswith(STAGE):
                self._say(line.removeprefix(STAGE).lower())
            else:
                print(line, file=sys.stderr)
        return len(text)

    def flush(self) -> None:
        """Nothing is kept that could be written already."""


def convert(source: Path, target: Path, bits: int | None, say: Say) -> None:
    """Writes the folder `target` from the model folder `source`.

    Args:
        source: a model folder.
        target: must not exist.
        bits: of each weight after quantising; None: the weights stay as precise as they are.
        say: called with one line for each stage.

    Raises:
        ModelMissingError: a file of the model is not there.
        BadModelError: it cannot be converted.
        FileExistsError: the target exists.
        OSError: the target cannot be written.
        MemoryError: it does not fit into memory.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already")
    folder = check_folder(source, lambda _: None)
    if bits is not None and is_quantised(folder.config):
        raise BadModelError(f"{source} is quantised already")
    with gguf.appearing_whole(target) as partial:
        _run(source, partial, bits, say)


def is_quantised(config: Mapping[str, Any]) -> bool:
    """True if a config.json says that its weights are packed."""
    return any(config.get(name) for name in ("quantization", "quantization_config"))


def _run(source: Path, partial: Path, bits: int | None, say: Say) -> None:
    """Calls mlx-lm, and turns what it raises into whose fault it is."""
    stages: Any = Stages(say)
    try:
        with redirect_stdout(stages):
            convert_folder(str(source), str(partial), quantize=bits is not None, q_bits=bits)
    except MODEL_FAULTS as error:
        if is_memory_text(str(error)):
            raise MemoryError(shorten(error)) from error
        if shutil.disk_usage(partial.parent).free < 2**20:
            # MLX does not say why it could not write.
            raise OSError(f"{partial.parent}: no space left: {shorten(error)}") from error
        raise BadModelError(f"{source} cannot be converted: {shorten(error)}") from error


def main(arguments: Sequence[str]) -> int:
    """Converts; says on standard output what it does, and on standard error what went wrong."""

    output = sys.stdout  # what is printed during the conversion goes elsewhere

    def say(line: str) -> None:
        print(line, file=output, flush=True)

    def fail(error: BaseException, code: int) -> int:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return code

    source, target = map(Path, arguments[:2])
    bits = int(arguments[2]) if len(arguments) > 2 else None
    # The folder that is being written is removed in any case.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(INTERRUPTED))
    try:
        if not source.is_dir():
            limit_memory(GGUF_FACTOR * source.stat().st_size + GGUF_SPARE_BYTES)
            gguf.convert(source, target, say)
        else:
            convert(source, target, bits, say)
    except ModelMissingError as error:
        return fail(error, ExitCode.MODEL_MISSING)
    except BadModelError as error:
        return fail(error, ExitCode.BAD_MODEL)
    except OSError as error:
        return fail(error, UNWRITTEN)
    except MemoryError as error:
        return fail(error, ExitCode.OUT_OF_MEMORY)
    except KeyboardInterrupt:
        return INTERRUPTED
    return ExitCode.ASKED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
