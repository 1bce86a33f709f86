"""Makes folders of one name hang whoever looks into them, as those of a dead network disk: a folder
for PYTHONPATH, which processes read that are started with it."""

import os
import threading
from typing import Any

NAME = "silent"

look_into, look_at, begin = os.listdir, os.stat, os.open


def is_silent(path: object) -> bool:
    """True if a path leads to or into such a folder."""
    return isinstance(path, str | os.PathLike) and NAME in os.fspath(path).split(os.sep)


def hang_if_silent(path: object) -> None:
    """Never return for such a path."""
    if is_silent(path):
        threading.Event().wait()


def listdir(path: Any = ".") -> Any:
    """List a folder."""
    hang_if_silent(path)
    return look_into(path)


def stat(path: Any, **options: Any) -> os.stat_result:
    """Look at a file."""
    hang_if_silent(path)
    return look_at(path, **options)


def open_file(path: Any, *arguments: Any, **options: Any) -> int:
    hang_if_silent(path)
    return begin(path, *arguments, **options)


for name, function in {"listdir": listdir, "stat": stat, "open": open_file}.items():
    setattr(os, name, function)
