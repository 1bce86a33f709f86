"""One large file: fetched from where an earlier attempt stopped, and checked against its digest.

Plain HTTP is used and not Xet, which keeps nothing of half a file. A file that is wrong is fetched
once more from its beginning; wrong again, the hub's data is damaged.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from mlxsup.protocol.version import VERSION

from .failures import DamagedError, MissingFileError
from .progress import Meter

PARTIAL_SUFFIX = ".mlxsup.incomplete"
"""Behind the name of a file of which a part has arrived; `hf cache` takes these for its own."""

HASH_BYTES = 4 * 2**20
CHUNK_BYTES = 2**20
"""So much of a file is lost at most when its process ends; huggingface_hub would take ten times as
much before it writes anything."""

NOT_FOUND = 404
RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeFile:
    """A file with a known digest.

    Attributes:
        repo: its repository.
        commit: the commit that it belongs to.
        path: in the repository.
        size_bytes: as the hub lists it.
        digest: SHA-256 of its content, in hexadecimal.
        blob: where the cache keeps its content.
    """

    repo: str
    commit: str
    path: str
    size_bytes: int
    digest: str
    blob: Path

    @property
    def partial(self) -> Path:
        """What has arrived of it, from its beginning."""
        return self.blob.with_name(self.blob.name + PARTIAL_SUFFIX)

    @property
    def done_bytes(self) -> int:
        """How much of it is on the disk; a part that is longer than the whole counts as nothing."""
        if self.blob.exists():
            return self.size_bytes
        try:
            arrived = self.partial.stat().st_size
        except FileNotFoundError:
            return 0
        return arrived if arrived <= self.size_bytes else 0


def fetch_large(file: LargeFile, meter: Meter) -> None:
    """Fetches what is missing of a file; once more from its beginning if it is not as announced.

    Args:
        file: which.
        meter: counts what arrives.

    Raises:
        DamagedError: its content is not what the hub had announced, twice; nothing of it is kept.
        MissingFileError: the hub does not have it.
        OSError: it cannot be fetched, or not be written; what has arrived is kept.
    """
    if file.blob.exists():
        return
    file.blob.parent.mkdir(parents=True, exist_ok=True)
    try:
        _fetch_checked(file, meter)
    except DamagedError:
        # The beginning of it, or a byte on the way, may have been damaged here.
        _fetch_checked(file, meter)
    os.replace(file.partial, file.blob)


def _fetch_checked(file: LargeFile, meter: Meter) -> None:
    """Fetches what is missing, and removes all of it if the whole is not what was announced."""
    try:
        _fetch_rest(file, meter)
        if _digest(file.partial) != file.digest:
            raise DamagedError(f"{file.path} of {file.repo} has another digest than was announced")
    except DamagedError:
        meter.add(-file.done_bytes)
        file.partial.unlink()
        raise


def _fetch_rest(file: LargeFile, meter: Meter) -> None:
    done_bytes = file.done_bytes
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    with file.partial.open("r+b" if done_bytes else "wb", buffering=0) as raw:
        raw.seek(0, os.SEEK_END)
        counted = _Counted(cast(BinaryIO, raw), file, done_bytes, meter)
        while counted.done_bytes < file.size_bytes:
            _fetch_piece(file, counted)
        os.fsync(raw.fileno())


def _fetch_piece(file: LargeFile, counted: _Counted) -> None:
    """Fetches the rest of a file, or as much of it as a hub sends with one answer."""
    begins_at = counted.done_bytes
    ends_at = min(begins_at + constants.MAX_HTTP_DOWNLOAD_SIZE, file.size_bytes)
    headers = build_hf_headers(library_name="mlxsup", library_version=VERSION)
    if ends_at < file.size_bytes:
        headers["Range"] = f"bytes=0-{ends_at - 1}"  # http_get puts the true beginning there
    try:
        http_get(
            hf_hub_url(file.repo, file.path, revision=file.commit),
            cast(BinaryIO, counted),
            resume_size=begins_at,
            headers=headers,
            expected_size=ends_at,
            displayed_filename=file.path,
        )
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == NOT_FOUND:
            message = f"the hub lists {file.path} of {file.repo} and does not have it"
            raise MissingFileError(message) from None
        if status != RANGE_NOT_SATISFIABLE:
            raise
        raise DamagedError(_shorter(file)) from None
    except OSError as error:
        if error.errno is not None:
            raise
        if counted.done_bytes != file.size_bytes:  # else it was sent whole, whatever was asked for
            raise DamagedError(_shorter(file)) from None  # its length is not what was announced


class _Counted:
    """A file of which each byte is counted, and that takes no more than were announced.

    Args:
        raw: not buffered, so that a full disk is noticed by the write that fills it.
        file: what is fetched.
        done_bytes: of it, before.
        meter: counts what arrives.
    """

    def __init__(self, raw: BinaryIO, file: LargeFile, done_bytes: int, meter: Meter) -> None:
        self._raw = raw
        self._file = file
        self._done_bytes = done_bytes
        self._meter = meter

    @property
    def done_bytes(self) -> int:
        """How much of the file is there by now."""
        return self._done_bytes

    def write(self, data: bytes) -> int:
        """Writes all of it, or raises an error."""
        if self._done_bytes + len(data) > self._file.size_bytes:
            file = self._file
            raise DamagedError(
                f"{file.path} of {file.repo} is longer than the {file.size_bytes} bytes announced"
            )
        view = memoryview(data)
        while view:
            written = self._raw.write(view)
            view = view[written:]
            self._done_bytes += written
            self._meter.add(written)
        return len(data)

    def tell(self) -> int:
        """How long it is by now."""
        return self._raw.tell()

    def seek(self, offset: int) -> int:
        """Goes back, because the hub sends the file from its beginning."""
        return self._raw.seek(offset)

    def truncate(self) -> int:
        """Forgets what is behind the place where it is."""
        length = self._raw.truncate()
        self._meter.add(length - self._done_bytes)
        self._done_bytes = length
        return length


def _shorter(file: LargeFile) -> str:
    return f"{file.path} of {file.repo} is shorter than the {file.size_bytes} bytes announced"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            digest.update(piece)
    return digest.hexdigest()
