"""The conversion of a GGUF file or a folder into a folder of a model, in a process of its own."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxsup.protocol.folders import MODELS_DIR
from mlxsup.protocol.ids import DEFAULT_REVISION
from mlxsup.protocol.launch import ExitCode, child_environment
from mlxsup.store.hub_cache import find_snapshot, is_owned_repository
from mlxsup.store.local_models import short_name
from mlxsup.store.model_folder import GGUF_SUFFIX, describe, folder_problem, repository_problem

from .catalogue import entry_called
from .configuration import optional_configuration
from .detach import held_interrupt
from .exit_status import CliError, ExitStatus
from .terminal.output import Output
from .terminal.text import format_bytes

MODULE = "mlxsup.worker.engines.mlx.conversion"
"""A child process runs it: the command line does not import MLX."""

FULL_BITS = 16
SPARE_FACTOR = 1.3
"""Scales, biases and layers that stay as precise as they were."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
"""Signals that a process brings on itself by what it reads; memory that runs out is SIGKILL."""

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def convert_model(
    source: str, target: Path | None, bits: int | None, options: str, output: Output
) -> None:
    """Convert, and say where the new folder is.

    Args:
        source: a path, OWNER/NAME, or a name of the configuration.
        target: the new folder; None: one in ~/.mlxsup/models.
        bits: of the weights; None: as they are.
        options: as they were given, for hints.
        output: takes the stages and the result.
    """
    path = _source(source)
    again = f"mlxsup convert {shlex.quote(source)} TARGET{options}"
    if path.is_file() and bits is not None:
        message = "a GGUF file cannot be quantised again"
        hint = "remove --quantize and --bits"
        raise CliError(message, hint=hint, status=ExitStatus.USAGE)
    folder = _target(target, path if path.is_file() else Path(source), again)
    _check_room(path, folder, bits, again)
    _run(path, folder, bits, output)
    size_bytes = describe(folder).size_bytes
    output.result(
        {"path": str(folder), "size_bytes": size_bytes},
        f"wrote {folder} ({format_bytes(size_bytes)})",
    )
    output.note(f"hint: serve it with `mlxsup add {shlex.quote(str(folder))}`")


def converted(path: Path, output: Output) -> Path:
    """Return the folder in ~/.mlxsup/models that a GGUF file was converted into, now if need be.

    Raises:
        CliError: it cannot be converted.
    """
    folder = Path(MODELS_DIR).expanduser().absolute() / short_name(path.stem, ())
    if not folder.is_dir():
        again = f"mlxsup convert {shlex.quote(str(path))} TARGET"
        _check_room(_source(str(path)), folder, None, again)
        _run(path, folder, None, output)
    return folder


def _source(given: str) -> Path:
    """Return the GGUF file or the folder that is meant, or refuse what is neither.

    Args:
        given: a path, OWNER/NAME, or a name of the configuration.
    """
    path = Path(given).expanduser().absolute()
    if path.suffix.lower() == GGUF_SUFFIX and not path.is_dir():
        if path.is_file():
            return path
        message, hint = f"{path} does not exist", "check the path, or download the file first"
        if path.exists():
            message, hint = f"{path} is not a regular file", "give the path of the file itself"
        raise CliError(message, code="model_folder", hint=hint)
    problem = None
    if not path.exists() and is_owned_repository(given):
        try:
            snapshot = find_snapshot(given)
        except OSError:
            snapshot = None
        if snapshot is None:
            problem = repository_problem(given, DEFAULT_REVISION)
        else:
            path = snapshot
    elif not path.exists() and (configuration := optional_configuration(None)) is not None:
        entry = entry_called(given, configuration)
        path = path if entry is None else Path(entry.launch.path)
    problem = problem or folder_problem(path)
    if problem is not None:
        raise CliError(problem.text, code="model_folder", hint=problem.hint)
    return path


def _target(given: Path | None, source: Path, again: str) -> Path:
    """Return the new folder, by default named after the source; refuse one that cannot be made."""
    name = source.stem if source.suffix.lower() == GGUF_SUFFIX else source.name
    default = Path(MODELS_DIR).expanduser() / short_name(name, ())
    target = (given or default).expanduser().absolute()
    place = next(one for one in (target, *target.parents) if os.path.lexists(one))
    hint = f"choose another folder: `{again}`"
    if place == target:
        message = f"{target} already exists; nothing was changed"
        raise CliError(message, code="file_exists", hint=hint)
    if not place.is_dir():
        message = f"cannot create {target}: {place} is not a folder"
        raise CliError(message, code="output", hint=hint)
    return target


def _check_room(source: Path, target: Path, bits: int | None, again: str) -> None:
    """Refuse to begin what the disk has no room for."""
    size = source.stat().st_size if source.is_file() else describe(source).size_bytes
    needed = size if bits is None else min(size, int(size * bits / FULL_BITS * SPARE_FACTOR))
    place = next(folder for folder in target.parents if folder.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        message = (
            f"{place} has only {format_bytes(free)} free; the conversion needs about "
            f"{format_bytes(needed)}"
        )
        hint = f"choose a folder on another disk: `{again}`"
        raise CliError(message, code="disk_full", hint=hint)


def _run(source: Path, target: Path, bits: int | None, output: Output) -> None:
    """Run the conversion and show its stages; end it if this command is interrupted."""
    more = [] if bits is None else [str(bits)]
    command = [sys.executable, "-P", "-m", MODULE, str(source), str(target), *more]
    child = None
    with tempfile.TemporaryFile("w+") as errors:
        try:
            with held_interrupt():
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=child_environment(os.environ) | OFFLINE,
                )
            assert child.stdout is not None
            for line in child.stdout:
                output.note(line.rstrip("\n"))
            code = child.wait()
        finally:
            if child is not None and child.poll() is None:
                child.terminate()  # it removes what it has written
                child.wait()
            if child is not None and child.returncode < 0:
                partial = target.with_name(f".{target.name}.{child.pid}.partial")
                shutil.rmtree(partial, ignore_errors=True)
        if code:
            errors.seek(0)
            raise _failure(code, errors.read(), source)


def _failure(code: int, printed: str, source: Path) -> CliError:
    """Return what went wrong, in the child's own words if it had any."""
    lines = [line for line in printed.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("error: ")]
    if said:
        message, hint = said[-1].removeprefix("error: "), _hint(code, source)
    elif -code in CRASHES:
        name = signal.Signals(-code).name
        message = f"{source} is damaged or malicious: reading it crashed with {name}"
        hint = _hint(ExitCode.BAD_MODEL, source)
    else:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        message = f"the conversion ended with {how}{f': {lines[-1]}' if lines else ''}"
        hint = "it may have run out of memory" if -code == signal.SIGKILL else ""
    return CliError(message, code="conversion_failed", hint=hint)


def _hint(code: int, source: Path) -> str:
    """Return what to do about an error of the conversion."""
    if code == ExitCode.OUT_OF_MEMORY:
        return "unload models or quit other programs, then try again"
    if code not in (ExitCode.BAD_MODEL, ExitCode.MODEL_MISSING):
        return "choose a writable folder on a disk with enough space"
    if source.is_file():
        return (
            "download the file again if it may be incomplete; otherwise use the original "
            "repository: `mlxsup pull OWNER/NAME`"
        )
    return f"`mlxsup show {shlex.quote(str(source))}` describes it"
