"""The processes that read model folders, and what becomes of those that end or hang."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.protocol.codec import to_line
from mlxsup.protocol.estimate import ModelMemory
from mlxsup.supervisor.memory import estimates as estimates_module
from mlxsup.supervisor.memory.estimates import Estimates, ask, ask_engine
from mlxsup.supervisor.memory.folder_reader import Look, Place, Question, reader_argv

from support.daemon.hub_caches import REPO, write_repository
from support.eventually import eventually
from support.models.safetensors_files import llama_arrays, llama_config, write_folder

SILENT = Path(__file__).parents[1] / "support" / "silent_folders"


def look(*places: Place, estimates: Estimates | None = None) -> list[Look]:
    """What is found, in the order of the places."""
    looks = asyncio.run((estimates or Estimates()).look_at(places))
    return [looks[place] for place in places]


def model(folder: Path, **config: Any) -> Place:
    write_folder(folder, llama_config(**config), llama_arrays())
    return Place(str(folder))


def test_a_folder_that_has_not_changed_is_not_read_again(tmp_path: Path) -> None:
    """It could not be: its config.json has the size and the time of before, and other letters."""
    place, estimates = model(tmp_path / "m"), Estimates()
    [first] = look(place, estimates=estimates)
    config = tmp_path / "m" / "config.json"
    times = config.stat().st_atime_ns, config.stat().st_mtime_ns
    config.write_text("x" * config.stat().st_size)
    os.utime(config, ns=times)
    assert look(place, estimates=estimates) == [first]
    os.utime(config, ns=(times[0], times[1] + 1))
    [changed] = look(place, estimates=estimates)
    assert changed.estimate is None
    assert "is not JSON" in changed.problem


def test_a_folder_that_falls_silent_keeps_what_is_known_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [model(tmp_path / "silent"), model(tmp_path / "m")]
    estimates = Estimates(quiet_s=1.0)
    known, other = look(*places, estimates=estimates)
    monkeypatch.setenv("PYTHONPATH", str(SILENT))
    silent, still = look(*places, estimates=estimates)
    assert (silent.estimate, silent.is_read) == (known.estimate, False)
    assert silent.problem.startswith("its folder does not respond")
    assert still == other


def test_a_repository_is_looked_up_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = write_repository(tmp_path)
    there, lacking = look(Place("", REPO, "main"), Place("", "some/other", "main"))
    assert (there.path, there.is_lacking) == (str(snapshot), False)
    assert there.estimate is not None
    assert (lacking.path, lacking.is_lacking) == (str(tmp_path / "models--some--other"), True)


def test_a_folder_that_ends_the_process_costs_the_others_nothing(tmp_path: Path) -> None:
    places = [model(tmp_path / name) for name in ("a", "deadly", "b")]
    script = (
        "import os, runpy, sys\n"
        "from mlxsup.supervisor.memory import folder_reader\n"
        "read = folder_reader.read_folder\n"
        "def fall(path, *more):\n"
        "    if path.name == 'deadly': os.kill(os.getpid(), 9)\n"
        "    return read(path, *more)\n"
        "folder_reader.read_folder = fall\n"
        "folder_reader.main()\n"
    )
    estimates = Estimates([sys.executable, "-c", script])
    first, deadly, last = look(*places, estimates=estimates)
    assert first.estimate is not None
    assert last.estimate is not None
    assert deadly.estimate is None
    assert "the process that read its folder has ended (signal 9)" in deadly.problem


def test_a_process_that_works_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimates_module, "WORK_S", 0.01)  # a busy machine leaves it little
    monkeypatch.setattr(estimates_module, "BUSY_S", 6.0)  # from one answer to the next
    places = [model(tmp_path / name) for name in "abc"]
    script = (
        "import time\n"
        "from mlxsup.supervisor.memory import folder_reader\n"
        "read = folder_reader.read_folder\n"
        "def work(*args):\n"
        "    end = time.monotonic() + 2.5\n"
        "    while time.monotonic() < end: pass\n"
        "    return read(*args)\n"
        "folder_reader.read_folder, folder_reader.THREADS = work, 1\n"
        "folder_reader.main()\n"
    )
    found = look(*places, estimates=Estimates([sys.executable, "-c", script], quiet_s=0.8))
    assert all(one.estimate is not None for one in found), found


def test_a_program_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    [found] = look(model(tmp_path / "m"), estimates=Estimates([str(tmp_path / "none")]))
    assert "could not be started" in found.problem


def test_a_process_whose_parent_is_gone_ends(tmp_path: Path) -> None:
    """One that hangs reads no end of its input."""
    folder = model(tmp_path / "silent").path
    question = to_line(Question(number=0, place=Place(folder)))
    script = (
        "import os, subprocess, sys\n"
        f"argv = [*{reader_argv()!r}, str(os.getpid())]\n"
        "child = subprocess.Popen(argv, stdin=-1, stdout=-1, stderr=-3)\n"
        f"child.stdin.write({question!r}); child.stdin.close()\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SILENT)}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env=environment, timeout=60
    )
    pid = int(done.stdout)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not keep to a limit of memory")
def test_a_lower_limit_of_the_user_ends_nothing(tmp_path: Path) -> None:
    question = to_line(Question(number=0, place=Place(str(tmp_path / "none"))))
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))\n"
        "from mlxsup.supervisor.memory import folder_reader\n"
        "folder_reader.main()\n"
    )
    argv = [sys.executable, "-c", script, str(os.getpid())]
    done = subprocess.run(argv, input=question, capture_output=True, timeout=60)
    assert b"does not exist" in done.stdout, done.stderr


def test_a_path_that_cannot_be_one_is_a_problem_of_its_model(tmp_path: Path) -> None:
    there = model(tmp_path / "m")
    found, odd = look(there, Place("/a\0b"))
    assert found.estimate is not None
    assert odd.problem == "the model folder /a\0b does not exist"


def test_a_long_name_is_cut_and_has_no_lone_surrogates(tmp_path: Path) -> None:
    place = model(tmp_path / "m")
    index = {"weight_map": {"a": "\ud800" + "x" * 10**5}}
    (tmp_path / "m" / "model.safetensors.index.json").write_text(json.dumps(index))
    [found] = look(place)
    assert "/m/?xxx" in found.problem
    assert len(found.problem) == 1000


def test_a_check_names_damage_that_only_a_load_meets(tmp_path: Path) -> None:
    place = model(tmp_path / "m")
    weights = tmp_path / "m" / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    questions = [Question(number=n, place=place, is_checked=n == 1) for n in range(2)]
    answers = asyncio.run(ask(questions))  # they come in any order
    plain, checked = answers[0], answers[1]
    assert not isinstance(plain, str)
    assert not isinstance(checked, str)
    assert plain.problem == ""
    assert plain.estimate == checked.estimate is not None
    assert f"{weights} is incomplete" in checked.problem


# ---------------------------------------------------------------- the process that asks mlx-lm


ENGINE = """
import json, os, sys, time
for line in sys.stdin:
    question = json.loads(line)
    path = question["path"]
    if path == "deadly":
        os.kill(os.getpid(), 9)
    if path == "busy":
        while True: pass
    if path == "silent":
        time.sleep(600)
    memory = {"weight_bytes": 5, "layers": []}
    if path == "huge":
        memory["weight_bytes"] = 2**60
    problem = "why" if path == "refused" else ""
    memory = None if problem else memory
    answer = {"number": question["number"], "memory": memory, "problem": problem}
    print(json.dumps(answer), flush=True)
"""


def test_a_model_that_cannot_be_asked_about_is_measured_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those around it are asked about, and no process is left."""
    monkeypatch.setattr(estimates_module, "BUSY_S", 3.0)
    monkeypatch.setattr(estimates_module, "WORK_S", 0.01)  # a busy machine leaves it little
    paths = ["a", "deadly", "b", "busy", "silent", "huge", "refused", "c"]
    argv = [sys.executable, "-c", ENGINE]
    found = asyncio.run(ask_engine(dict.fromkeys(paths, "k"), argv=argv, quiet_s=2.0))
    ended = "the process that asked mlx-lm has ended (signal 9)"
    slow = "mlx-lm takes too long to build it"
    assert found == {
        **dict.fromkeys("abc", ModelMemory(weight_bytes=5, layers=())),
        "deadly": ended, "busy": slow, "silent": slow, "refused": "why",
        "huge": "its config.json has impossible sizes",
    }  # fmt: skip
    children = psutil.Process().children()
    assert not [one for one in children if ENGINE in one.cmdline()]


def test_an_engine_that_cannot_be_started_is_named(tmp_path: Path) -> None:
    found = asyncio.run(ask_engine({"a": "k", "b": "k"}, argv=[str(tmp_path / "none")]))
    assert all("could not be started" in str(one) for one in found.values())


def test_one_process_asks_mlx_lm_at_a_time_and_an_answer_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = 0, 0
    asked: list[str] = []

    async def engine(keys: dict[str, str]) -> dict[str, ModelMemory]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        asked.extend(keys)
        return dict.fromkeys(keys, ModelMemory(weight_bytes=1, layers=()))

    monkeypatch.setattr(estimates_module, "ask_engine", engine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    places = [model(tmp_path / name) for name in ("a", "b")]
    estimates = Estimates()

    async def look_at_both() -> None:
        await asyncio.gather(*(estimates.look_at([place]) for place in places))
        await estimates.look_at(places)

    asyncio.run(look_at_both())
    assert (most, sorted(asked)) == (1, [place.path for place in places])
