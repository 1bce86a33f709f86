"""Downloads of a test: a repository worth fetching, and the process that fetches it."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mlxsup.protocol.download import (
    DownloadFailed,
    DownloadReport,
    DownloadSpec,
    Repository,
    download_argv,
    read_report,
)

from support.cli.cli import OFFLINE
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
LIMIT_S = 60.0

FULL_DISK = """
import errno, io, os, pathlib
open_path = pathlib.Path.open

class Full(io.FileIO):
    def write(self, data):
        room = {room_bytes} - self.tell()
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[:room])

def opened(path, mode="r", *others, **more):
    if path.name.endswith(".incomplete") and mode == "wb":
        return io.BufferedWriter(Full(path, mode))
    return open_path(path, mode, *others, **more)

pathlib.Path.open = opened
"""


def hub_environment(hub: LocalHub, home: Path, **others: str) -> dict[str, str]:
    """The variables that make a program use this hub, with its cache in this home."""
    hidden = ("HF_TOKEN", "HF_HUB_CACHE", "HUGGING_FACE_HUB_TOKEN")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    patient = {"HF_HUB_DOWNLOAD_TIMEOUT": "600", "HF_HUB_ETAG_TIMEOUT": "600"}
    here = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf")}
    return {**kept, **dict.fromkeys(OFFLINE, "0"), **patient, **here, **others}


def runs_first(lines: str, folder: Path) -> str:
    """A PYTHONPATH with which every interpreter runs these lines at its start."""
    first = folder / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(lines)
    return os.pathsep.join([str(first), os.environ["PYTHONPATH"]])


def disk_full_at(room_bytes: int) -> str:
    """Lines after which a process finds the disk full once so much of the weights is on it."""
    return FULL_DISK.format(room_bytes=room_bytes)


def repo_folder(home: Path, repo: str = REPO) -> Path:
    """Where the cache keeps a repository."""
    return home / "hf" / "hub" / f"models--{repo.replace('/', '--')}"


def snapshot(home: Path, repo: str = REPO) -> Path:
    """Where the files of a repository appear."""
    return repo_folder(home, repo) / "snapshots" / COMMIT


def parts(home: Path) -> list[Path]:
    """What is there of files that have not arrived."""
    return list(repo_folder(home).glob("blobs/*.incomplete"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@dataclass(slots=True)
class Download:
    """A process that downloads.

    Attributes:
        process: with pipes.
        noise: lines of its output that are no reports.
    """

    process: subprocess.Popen[bytes]
    noise: list[str] = field(default_factory=list)

    def reports(self) -> Iterator[DownloadReport]:
        """What it reports, until its output ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            report = read_report(line)
            if report is None:
                self.noise.append(line.decode())
            else:
                yield report

    def end(self) -> DownloadReport:
        """Its last report, once it has ended."""
        *_, last = self.reports()
        self.process.wait(LIMIT_S)
        return last

    def failure(self) -> DownloadFailed:
        """Why it failed, once it has ended."""
        last = self.end()
        assert isinstance(last, DownloadFailed), last
        assert self.process.returncode == 1
        return last

    def close(self) -> None:
        """Ends it, if it has not ended."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_download(
    environment: Mapping[str, str], repository: Repository | None = None
) -> Download:
    """Starts a download.

    Args:
        environment: of the process.
        repository: what it downloads; None: the one of this module.
    """
    process = subprocess.Popen(
        download_argv(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
    )
    spec = DownloadSpec(repository=repository or Repository(REPO), parent_pid=os.getpid())
    assert process.stdin is not None
    process.stdin.write(spec.to_line())
    process.stdin.flush()
    return Download(process)
