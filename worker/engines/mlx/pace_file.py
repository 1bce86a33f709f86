"""The file in which a worker keeps its model's pace for the lives after it; no MLX.

It names the machine, the model's fingerprint and the way of batching, and has a checksum, because
one wrong digit could have the first chunk take minutes. A life that has measured nothing writes
nothing, or each life would pass on the caution of the one before.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxsup.protocol.text import log_line

from .pace import Pace, pace_from

FILE_NAME = "pace.json"
FORMAT = 2
"""Changes when the file means something else."""

MAX_BYTES = 4096
"""No file that this worker writes is longer."""

KEEP_EVERY_S = 60.0
"""A worker that serves replaces the file at most this often."""

DAMAGED = "it is damaged"

logger = logging.getLogger(__name__)


class OtherPaceError(Exception):
    """The file is whole and of something else; the message says of what."""


def this_machine(device: str) -> str:
    """Names the machine, so that another one with the same folder does not use its pace.

    Args:
        device: MLX's name for the device.
    """
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores, {device}"


class PaceFile:
    """One file for each model, replaced atomically by its only worker.

    A file that cannot be used is ignored, because everything in it can be measured again. What is
    wrong with it, or with writing it, is logged once.

    Args:
        folder: where the file is; None: nothing is kept.
        model: the model's name, for the log.
        of: what the pace depends on, in words: the model, the machine, the way of batching.
    """

    def __init__(self, folder: str | None, *, model: str, of: Mapping[str, str]) -> None:
        self._path = None if folder is None else Path(folder) / FILE_NAME
        self._model = model
        self._of = dict(of)
        self._kept: Pace | None = None
        self._due_at = 0.0

    def read(self) -> Pace | None:
        """The pace that an earlier life has kept; None if there is none for this life."""
        if self._path is None:
            return None
        try:
            with self._path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            self._kept = parse(content, self._of)
        except FileNotFoundError:
            return None
        except OtherPaceError as error:
            logger.info(log_line("learned pace not used", model=self._model, cause=error))
        except OSError as error:
            logger.warning(
                log_line("learned pace not used", model=self._model, cause=error.strerror)
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            logger.warning(log_line("learned pace not used", model=self._model, cause=DAMAGED))
        return self._kept

    def keep(self, pace: Pace | None) -> None:
        """Replaces the file, if there is news; after an error nothing more is kept."""
        if self._path is None or pace is None or pace == self._kept:
            return
        draft = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_bytes(to_bytes(pace, self._of))
            os.replace(draft, self._path)
        except OSError as error:
            logger.warning(
                log_line("learned pace not kept", model=self._model, cause=error.strerror)
            )
            self._path = None
            return
        self._kept = pace

    def keep_in_time(self, pace_of: Callable[[], Pace | None], now: float) -> None:
        """Does the same, at most every `KEEP_EVERY_S`.

        Args:
            pace_of: asked for the pace if it is time.
            now: monotonic seconds.
        """
        if self._path is not None and now >= self._due_at:
            self._due_at = now + KEEP_EVERY_S
            self.keep(pace_of())


def to_bytes(pace: Pace, of: Mapping[str, str]) -> bytes:
    """The content of a file."""
    said = {"of": dict(of), "pace": asdict(pace)}
    return json.dumps({"format": FORMAT, "check": checksum(said), **said}, indent=1).encode()


def parse(content: bytes, of: Mapping[str, str]) -> Pace:
    """The pace in a file.

    Args:
        content: at most `MAX_BYTES`; whatever is longer is damaged.
        of: what the pace must depend on.

    Raises:
        OtherPaceError: it depends on something else, or is of another version of mlxsup.
        ValueError, LookupError, TypeError, RecursionError: the file is damaged.
    """
    if len(content) > MAX_BYTES:
        raise ValueError("too long")
    value = json.loads(content)
    if type(value["format"]) is int and value["format"] != FORMAT:
        raise OtherPaceError("it is of another version of mlxsup")
    said = {"of": dict(value["of"]), "pace": value["pace"]}
    if value["check"] != checksum(said):
        raise ValueError("its numbers are not those that were written")
    different = [name for name in of if said["of"].get(name) != of[name]]
    if different:
        raise OtherPaceError(f"it is of another {different[0]}")
    return pace_from(said["pace"])


def checksum(said: Mapping[str, Any]) -> int:
    """A sum over everything else: a digit that has changed would have chunks of the wrong size."""
    return zlib.crc32(json.dumps(said, sort_keys=True).encode())
