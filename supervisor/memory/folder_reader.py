"""Reads model folders in a process of its own.

A folder is somebody else's: its disk may never answer, and its headers may take long to parse. So
the daemon never opens it; `estimates.py` starts this program, gives it a line for each folder on
standard input, and reads a line for each answer. Each folder has a thread, in which it may hang
without keeping the others.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from mlxsup.protocol.codec import read_part, to_map
from mlxsup.protocol.launch import LaunchSettings, lower_limit
from mlxsup.store.hub_cache import find_cache, find_snapshot, repository_folder
from mlxsup.store.model_folder import damaged_weights, missing_files

from .folder import Estimate, fingerprint, read_folder, stamp

THREADS = 64
"""Folders that are read at the same time; as many may hang before others have to wait."""

STACK_BYTES = 2 * 2**20
MEMORY_BYTES = 3 * 2**30
"""Address space of the process, on Linux: files that are made to take more end one answer, or this
process, and not the machine."""

PARENT_LOOK_S = 1.0
INTERNAL_EXIT_CODE = 70

MAX_TEXT = 1000
"""Letters of a sentence, which may name what a file has made up."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an entry's model.

    Attributes:
        path: its folder, absolute; empty if it is a repository.
        repo: OWNER/NAME in the Hugging Face cache; empty if it is a folder.
        revision: of the repository.
        adapters: the folders of its adapters.
    """

    path: str
    repo: str = ""
    revision: str = ""
    adapters: tuple[str, ...] = ()


def place_of(launch: LaunchSettings, repo: str, revision: str) -> Place | None:
    """Return where a model is; None if it is no folder, as with the fake engine."""
    adapters = tuple(launch.adapters.values())
    if repo:
        return Place("", repo, revision, adapters)
    return None if launch.engine == "fake" else Place(launch.path, adapters=adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A folder to look at.

    Attributes:
        number: of the question; its answer has the same.
        place: where it is.
        known: the fingerprint of what is known of it: if that still holds, nothing is read.
        is_checked: whether to look for damage that only a load meets, too.
    """

    number: int
    place: Place
    known: str = ""
    is_checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The knowledge about a place, as far as memory and loads depend on it.

    Attributes:
        path: the folder; for a repository that of its snapshot, or where the cache would have it;
            empty if it did not answer and never has.
        is_lacking: the cache does not have all files of the repository, or does not answer.
        is_same: what was known of it still holds.
        estimate: what its files say; None if that is known, or cannot be read.
        problem: what is wrong with it, a sentence without a full stop; empty if nothing is.
        hint: what to do about it; may be empty.
        is_read: False if it did not answer: what is known of it is what was found before.
    """

    path: str
    is_lacking: bool = False
    is_same: bool = False
    estimate: Estimate | None = None
    problem: str = ""
    hint: str = ""
    is_read: bool = True


def reader_argv() -> list[str]:
    """Return the command, to which the pid of its parent is added.

    -P keeps the working folder out of the import path.
    """
    return [sys.executable, "-P", "-m", "mlxsup.supervisor.memory.folder_reader"]


def look(question: Question) -> Look:
    """Return what is found in a folder; this waits for its disk."""
    place, path, is_lacking = question.place, question.place.path, False
    if place.repo:
        cache = find_cache()
        try:
            snapshot = find_snapshot(place.repo, place.revision, cache=cache)
            is_lacking = snapshot is None or bool(missing_files(snapshot))
        except OSError:
            snapshot = None
        if snapshot is None:
            return Look(path=str(repository_folder(place.repo, cache)), is_lacking=True)
        path = str(snapshot)
    answer = Look(path=path, is_lacking=is_lacking)
    known = "" if is_lacking else question.known
    if known and known == _fingerprint(Path(path), place.adapters):
        return replace(answer, is_same=True)
    found = read_folder(Path(path), place.adapters)
    if isinstance(found, Estimate):
        answer = replace(answer, estimate=found)
        problem = damaged_weights(Path(path)) if question.is_checked else None
    else:
        problem = found
    if problem is None:
        return answer
    text = problem.text[:MAX_TEXT].encode(errors="replace").decode()
    return replace(answer, problem=text, hint=problem.hint)


def _fingerprint(path: Path, adapters: Sequence[str]) -> str:
    try:
        return fingerprint(stamp(path, adapters))
    except OSError:  # reading it says why
        return ""


def main() -> None:
    """Answer every question of standard input, in any order; end with the last, or the parent.

    The last argument is the parent's pid: it may be gone before this begins.
    """
    parent = int(sys.argv[-1])
    if sys.platform == "linux":
        lower_limit(resource.RLIMIT_AS, MEMORY_BYTES)
    threading.excepthook = lambda _: os._exit(INTERNAL_EXIT_CODE)
    questions: SimpleQueue[Question] = SimpleQueue()
    count = 0
    for line in sys.stdin.buffer:
        questions.put(read_part(Question, json.loads(line), ""))
        count += 1
    answers: SimpleQueue[str] = SimpleQueue()
    threading.stack_size(STACK_BYTES)
    for _ in range(min(count, THREADS)):
        threading.Thread(target=_work, args=(questions, answers), daemon=True).start()
    while count and os.getppid() == parent:
        try:
            answer = answers.get(timeout=PARENT_LOOK_S)
        except Empty:
            continue
        print(answer, flush=True)
        count -= 1
    os._exit(0)  # whatever hangs, hangs in a daemonic thread


def _work(questions: SimpleQueue[Question], answers: SimpleQueue[str]) -> None:
    while True:
        try:
            question = questions.get_nowait()
        except Empty:
            return
        answers.put(json.dumps([question.number, to_map(look(question))]))


if __name__ == "__main__":
    main()
