"""Whether the files of a model still are those that its worker has loaded."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.file_threads import FileThreads
from mlxsup.supervisor.memory import loaded_files
from mlxsup.supervisor.memory.folder import stamp
from mlxsup.supervisor.memory.loaded_files import FileLooks, difference

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
        return await looks.change(launch(folder, engine), loaded)

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
        return await looks.before_load(launch(folder, "fake"))

    assert asyncio.run(run()) is None


def test_a_folder_that_could_not_be_read_before_the_load_counts_as_changed(folder: Path) -> None:
    missing = folder / "missing"
    found = look(missing, lambda missing: missing.mkdir())
    assert found == "its folder could not be read when it was loaded"


def test_a_disk_that_does_not_answer_keeps_nobody_waiting_and_has_one_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ended = threading.Event(), list[bool]()

    def hang(path: Path) -> object:
        ended.append(answers.wait(60.0))
        return {}

    async def run() -> tuple[str, object]:
        looks = FileLooks(limit_s=0.05)
        monkeypatch.setattr(loaded_files, "stamp", hang)
        with pytest.raises(TimeoutError):
            await looks.before_load(launch(folder))
        said = await looks.change(launch(folder), {})
        monkeypatch.setattr(loaded_files, "stamp", stamp)
        patient = FileLooks()
        other = await patient.before_load(launch(folder))
        answers.set()
        return said, other

    said, other = asyncio.run(run())
    assert said == "its folder could not be read within 0.05 s"
    assert other == stamp(folder), "others do not wait"
    eventually(lambda: bool(ended))
    assert ended == [True], "the second look has waited for the first one's thread"


def test_a_thread_that_hangs_does_not_keep_the_process_from_ending() -> None:
    script = (
        "import asyncio, pathlib, threading\n"
        "from mlxsup.supervisor.file_threads import FileThreads\n"
        "hang = threading.Event().wait\n"
        "run = FileThreads().run(pathlib.Path('/x'), hang, limit_s=0.01)\n"
        "try: asyncio.run(run)\n"
        "except TimeoutError: print('ended')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert done.stdout == b"ended\n", done.stderr


def test_what_a_function_raises_is_raised_where_it_is_awaited() -> None:
    def fail() -> None:
        raise PermissionError(13, "no")

    async def run() -> None:
        threads = FileThreads()
        for _ in range(2):
            with pytest.raises(PermissionError):
                await threads.run(Path("/x"), fail, limit_s=60.0)

    asyncio.run(run())


def test_sizes_and_times_are_compared_by_name(folder: Path) -> None:
    found = stamp(folder)
    assert sorted(found) == ["config.json", "model-1.safetensors", "tokenizer.json"]
    assert difference(found, stamp(folder)) == ""
