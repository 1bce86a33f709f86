"""Downloads of a test: a repository worth fetching, and the process or daemon that fetches it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.download import (
    DownloadReport,
    DownloadSpec,
    Repository,
    download_argv,
    read_report,
)

from support.cli.cli import OFFLINE
from support.daemon.daemon import Daemon
from support.daemon.local_hub import COMMIT, LocalHub

MIB = 2**20
REPO = "org/tiny-model"
WEIGHTS_NAME = "model.safetensors"
CARD = "README.md"
WEIGHTS = random.Random(19).randbytes(4 * MIB)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    WEIGHTS_NAME: WEIGHTS,
    CARD: b"---\nlicense: apache-2.0\n---\nA tiny model.",
    "notes.md": b"not needed",
    "modeling.py": b"never downloaded",
}
NEEDED = {name: FILES[name] for name in ("config.json", "tokenizer.json", WEIGHTS_NAME, CARD)}
NEEDED_BYTES = sum(map(len, NEEDED.values()))
HELD_AT = 2 * MIB
LIMIT_S = 60.0

TOKEN = "hf_secretsecret"
"""Must never be seen again."""


def hub_environment(hub: LocalHub, home: Path, **others: str) -> dict[str, str]:
    """The variables that make a program use this hub, with its cache in this home."""
    hidden = ("HF_TOKEN", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "600", "HF_HUB_ETAG_TIMEOUT": "600"}
    here = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf")}
    return {**kept, **dict.fromkeys(OFFLINE, "0"), **patient, **here, **others}


def repo_folder(home: Path) -> Path:
    """Where the cache keeps the repository."""
    return home / "hf" / "hub" / f"models--{REPO.replace('/', '--')}"


def snapshot(home: Path) -> Path:
    """Where its files appear."""
    return repo_folder(home) / "snapshots" / COMMIT


def parts(home: Path) -> list[Path]:
    """What is there of files that have not arrived."""
    return list(repo_folder(home).glob("blobs/*.incomplete"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Download:
    """A process that downloads the repository of this module.

    Args:
        environment: of the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.process = subprocess.Popen(
            download_argv(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
        spec = DownloadSpec(repository=Repository(REPO))
        assert self.process.stdin is not None
        self.process.stdin.write(to_line(spec))
        self.process.stdin.flush()

    def reports(self) -> Iterator[DownloadReport]:
        """What it reports, until its output ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (report := read_report(line)) is not None:
                yield report

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


class DownloadingDaemon(Daemon):
    """A daemon that uses a hub, with a separate cache and token.

    Args:
        hub: that it uses.
        models: entries by name.
    """

    def __init__(self, hub: LocalHub, models: dict[str, dict[str, Any]]) -> None:
        super().__init__(models)
        self._variables = hub_environment(hub, self.folder, HF_TOKEN=TOKEN)

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it with these variables, too."""
        super().start(environment={**self._variables, **(environment or {})})
