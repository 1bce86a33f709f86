"""The file that `mlxsup why --report` writes: what somebody else needs to find a fault."""

from __future__ import annotations

import io
import json
import os
import platform
import tarfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mlxsup.protocol.folders import DAEMON_LOG_NAME
from mlxsup.protocol.log_files import tail
from mlxsup.protocol.version import VERSION

from ..connection import read_toml
from ..exit_status import CliError, ExitStatus
from .recording import Recording
from .redaction import redacted, redacted_entry, redacted_line

FOLDER = "mlxsup-report"
LINES = 400
"""How many lines of the end of each log are in it."""
MOST_LOGS = 64
MOST_ENTRIES = 5000

PACKAGES = ("mlx", "mlx-lm", "mlx-metal", "transformers", "huggingface_hub", "pyzmq", "msgpack")

README = """\
Written by `mlxsup why --report`. It has no prompt, no answer and no key: texts are left out unless
their field is known to hold none. Look through it before you send it to anybody.

versions.json       of mlxsup, of what it uses, and of the system
configuration.json  the configuration file
status.json         what the daemon said, if it answered
flight.json         what the flight recorder holds
logs/               the ends of the logs
"""


def write_report(
    path: Path,
    recording: Recording,
    *,
    folder: Path,
    config: Path | None,
    status: Mapping[str, Any] | None,
) -> list[str]:
    """Writes the archive, which only its owner may read; returns the names of the files in it.

    Args:
        path: of the archive, which must not exist.
        recording: of the daemon.
        folder: for its logs.
        config: its configuration file; None if it has none.
        status: of the daemon; None if it does not answer.

    Raises:
        CliError: there is a file already, or it cannot be written.
    """
    parts = dict(_parts(recording, folder, config, status))
    place = path.expanduser()
    try:
        descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CliError(
            f"there is a file at {path} already",
            code="file_exists",
            hint="name another one",
            status=ExitStatus.USAGE,
        ) from None
    except OSError as error:
        raise _unwritten(path, error) from None
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            tarfile.open(fileobj=file, mode="w:gz") as archive,
        ):
            for name, text in parts.items():
                _add(archive, name, text)
    except OSError as error:
        place.unlink(missing_ok=True)
        raise _unwritten(path, error) from None
    return list(parts)


def _unwritten(path: Path, error: OSError) -> CliError:
    return CliError(
        f"cannot write {path}: {error.strerror}",
        code="file",
        hint="name a file in a folder that you can write to",
    )


def _add(archive: tarfile.TarFile, name: str, text: str) -> None:
    data = text.encode(errors="replace")
    member = tarfile.TarInfo(f"{FOLDER}/{name}")
    member.size = len(data)
    member.mode = 0o600
    member.mtime = int(time.time())
    archive.addfile(member, io.BytesIO(data))


def _parts(
    recording: Recording, folder: Path, config: Path | None, status: Mapping[str, Any] | None
) -> Iterator[tuple[str, str]]:
    yield "README.txt", README
    yield "versions.json", _json(_versions())
    yield "configuration.json", _json(_configuration(config))
    if status is not None:
        said = {name: value for name, value in status.items() if name != "flight"}
        yield "status.json", _json(redacted(said))
    runs = [
        {
            "is_alive": run.is_alive,
            "alive_at": run.alive_at,
            "started": run.started.to_map() if run.started else None,
            "ended": run.ended.to_map() if run.ended else None,
            "entries": [redacted_entry(one.to_map()) for one in run.entries[-MOST_ENTRIES:]],
        }
        for run in recording.runs
    ]
    yield "flight.json", _json({"damage": bool(recording.damage), "runs": runs})
    for log in sorted(folder.glob("*.log"))[:MOST_LOGS]:
        is_daemon = log.stem == DAEMON_LOG_NAME
        lines = [redacted_line(line, is_daemon=is_daemon) for line in tail(log, LINES)]
        yield f"logs/{log.name}", "".join(f"{line}\n" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _versions() -> dict[str, Any]:
    found = {name: _version_of(name) for name in PACKAGES}
    return {
        "mlxsup": VERSION,
        **{name: said for name, said in found.items() if said is not None},
        "python": platform.python_version(),
        "platform": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "variables": sorted(name for name in os.environ if name.startswith(("MLXSUP_", "HF_"))),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _configuration(config: Path | None) -> Any:
    """The file without comments, which may say anything."""
    if config is None:
        return {"file": "none"}
    try:
        return redacted(read_toml(config))
    except CliError:
        return {"file": "cannot be read, or is not TOML"}
