"""The folders of a daemon, and how many files it may open."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from mlxsup.protocol.text import size_text

from ..facts import Folder, OpenFiles, Places
from ..finding import Finding, note, ok, problem

RUNTIME, LOGS, CACHE, KEYS = "runtime folder", "log folder", "model cache", "API keys"
FILES = "open files"

FULL_BYTES = 256 * 2**20
NEARLY_FULL_BYTES = 5 * 2**30
"""Less than most models take."""

NEW_KEY = "make a key with `mlxsup key new NAME`"

NETWORK = (
    "nfs", "nfs4", "smbfs", "cifs", "smb3", "afpfs", "webdav", "fuse.sshfs", "9p", "afs", "ceph",
)  # fmt: skip
"""File systems whose sockets and locks do not work, or not among machines."""

ANOTHER = "set runtime_dir to a folder that is not there yet: mlxsup creates it with mode 0700"


def check_places(facts: Places) -> Iterator[Finding]:
    """Judges the runtime folder, the log folder, the cache, and the file of API keys."""
    found = [*_runtime(facts)]
    yield from found or [ok(RUNTIME, str(facts.runtime.path))]
    yield from _logs(facts.logs)
    yield from _room(CACHE, facts.cache, "models are downloaded there")
    yield from _keys(facts)


def check_open_files(facts: OpenFiles) -> Iterator[Finding]:
    """Judges the hard limit, up to which a daemon raises its own."""
    if facts.hard is None or facts.hard >= facts.needed:
        limit = "any number" if facts.hard is None else f"{facts.hard:,}"
        yield ok(FILES, f"{limit} may be open; a daemon needs {facts.needed:,}")
        return
    linux = f"sudo prlimit --pid $$ --nofile={facts.needed}:{facts.needed}"
    mac = f"sudo launchctl limit maxfiles {facts.needed} {facts.needed}"
    yield problem(
        FILES,
        f"only {facts.hard:,} files may be open; a daemon needs {facts.needed:,} for its models",
        why="`mlxsup start` exits with 73",
        fix="for this shell; a service has its own limit, such as LimitNOFILE of systemd"
        if facts.system == "Linux"
        else "until the machine is started again",
        command=linux if facts.system == "Linux" else mac,
    )


def _runtime(facts: Places) -> Iterator[Finding]:
    folder = facts.runtime
    refused = "`mlxsup start` exits with 73"
    if facts.too_long:
        yield problem(RUNTIME, facts.too_long, why=refused, fix="set a shorter runtime_dir")
    if folder.is_there and not folder.is_folder:
        yield problem(
            RUNTIME, f"{folder.path} is not a folder", why=refused, fix="set another runtime_dir"
        )
        return
    if folder.owner is not None and folder.owner != facts.user:
        yield problem(
            RUNTIME,
            f"{folder.path} belongs to another user (uid {folder.owner})",
            why=refused,
            fix="set runtime_dir to a folder that you own",
        )
    elif folder.mode is not None and folder.mode != 0o700:
        can_chmod = folder.is_private_use
        yield problem(
            RUNTIME,
            f"{folder.path} has mode {folder.mode:04o}, so others may reach its sockets",
            why=refused,
            fix="" if can_chmod else ANOTHER,
            command=f"chmod 0700 {shlex.quote(str(folder.path))}" if can_chmod else "",
        )
    elif folder.refusal:
        yield problem(
            RUNTIME,
            f"{folder.path} cannot be used: {folder.refusal}",
            why=refused,
            fix="set runtime_dir to a folder that you can write to",
        )
    if folder.file_system in NETWORK:
        yield problem(
            RUNTIME,
            f"{folder.path} is on a network disk ({folder.file_system})",
            why="sockets and locks do not work there as they must",
            fix="set runtime_dir to a folder on a disk of this machine",
        )


def _logs(folder: Folder) -> Iterator[Finding]:
    if folder.refusal:
        yield problem(
            LOGS,
            f"{folder.path} cannot be written: {folder.refusal}",
            why="`mlxsup start` exits with 73, or nothing says later what happened",
            fix="set log_dir to a folder that you can write to",
        )
        return
    yield from _room(LOGS, folder, "lines are lost when the disk is full")


def _room(subject: str, folder: Folder, why: str) -> Iterator[Finding]:
    free = folder.free_bytes
    fix = "delete what you do not need; `mlxsup models` shows what models take, and `mlxsup rm`"
    fix += " removes one"
    if free is not None and free < FULL_BYTES:
        yield problem(
            subject, f"the disk of {folder.path} has only {size_text(free)} left", why=why, fix=fix
        )
    elif free is not None and free < NEARLY_FULL_BYTES:
        yield note(
            subject, f"the disk of {folder.path} has {size_text(free)} left", why=why, fix=fix
        )
    else:
        left = "" if free is None else f", {size_text(free)} free"
        yield ok(subject, f"{folder.path}{left}")


def _keys(facts: Places) -> Iterator[Finding]:
    if not facts.key_trouble:
        return
    command = f"chmod 600 {shlex.quote(str(facts.key_path))}" if facts.is_key_file_open else ""
    yield problem(
        KEYS,
        facts.key_trouble,
        why="the HTTP gateway refuses every request",
        fix="" if command else f"{NEW_KEY}, or end the need for keys with `mlxsup key off`",
        command=command,
    )
