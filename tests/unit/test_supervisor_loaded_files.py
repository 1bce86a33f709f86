"""Whether the files of a model still are those that its worker has loaded."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.memory import loaded_files
from mlxsup.supervisor.memory.loaded_files import FileLooks, difference, stamp

from support.eventually import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "model-1.safetensors", "tokenizer.json", "README.md"):
        (tmp_path / name).write_text(name)
    return tmp_path


def launch(folder: Path, engine: str = "mlx") -> LaunchSettings:
    return LaunchSettings(path=str(folder), engine=engine)


def look(folder: Path, change: Callable[[Path], object], engine: str = "mlx") -> str:
    """What is found if the folder changes after the load."""

    async def run() -> str:
        looks = FileLooks()
        loaded = await looks.before_load(launch(folder, engine))
        change(folder)
        found = await looks.change(launch(folder, engine), loaded)
        looks.close()
        return found

    return asyncio.run(run())


def rewrite(folder: Path) -> None:
    """The same size, at another time."""
    path = folder / "model-1.safetensors"
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_nothing_has_changed(folder: Path) -> None:
    assert look(folder, lambda folder: None) == ""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda f: (f / "config.json").write_text("longer than before"),
         "config.json has changed since it was loaded"),
        (rewrite, "model-1.safetensors has changed since it was loaded"),
        (lambda f: (f / "tokenizer.json").unlink(),
         "tokenizer.json was removed since it was loaded"),
        (lambda f: (f / "added_tokens.json").touch(),
         "added_tokens.json was added since it was loaded"),
    ],
)  # fmt: skip
def test_the_first_file_that_has_changed_is_named(
    folder: Path, change: Callable[[Path], object], found: str
) -> None:
    assert look(folder, change) == found


def test_files_that_answers_do_not_depend_on_may_change(folder: Path) -> None:
    assert look(folder, lambda folder: (folder / "README.md").write_text("more")) == ""
    assert look(folder, lambda folder: (folder / "notes").mkdir()) == ""


def test_a_folder_that_is_gone_has_changed(folder: Path) -> None:
    moved = folder.parent / "elsewhere"
    found = look(folder, lambda folder: folder.rename(moved))
    assert found == "its folder cannot be read (No such file or directory)"


def test_the_fake_engine_loads_no_files(folder: Path) -> None:
    assert look(folder, rewrite, engine="fake") == ""

    async def run() -> object:
        looks = FileLooks()
        loaded = await looks.before_load(launch(folder, "fake"))
        looks.close()
        return loaded

    assert asyncio.run(run()) is None


def test_a_folder_that_could_not_be_read_before_the_load_counts_as_changed(folder: Path) -> None:
    missing = folder / "missing"
    found = look(missing, lambda missing: missing.mkdir())
    assert found == "its folder could not be read when it was loaded"


def test_a_disk_that_does_not_answer_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ended = threading.Event(), list[bool]()

    async def run() -> tuple[object, str]:
        looks = FileLooks(limit_s=0.05)
        monkeypatch.setattr(loaded_files, "stamp", lambda path: ended.append(answers.wait(5.0)))
        found = await looks.before_load(launch(folder)), await looks.change(launch(folder), {})
        looks.close()
        answers.set()
        return found

    assert asyncio.run(run()) == (None, "its folder could not be read within 0.05 s")
    eventually(lambda: len(ended) == 1)
    assert ended == [True]


def test_sizes_and_times_are_compared_by_name(folder: Path) -> None:
    found = stamp(folder)
    assert sorted(found) == ["config.json", "model-1.safetensors", "tokenizer.json"]
    assert difference(found, stamp(folder)) == ""
