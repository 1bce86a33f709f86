"""Warm processes are like new ones, as far as a test can see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from mlxsup.supervisor.runtime_folder import raise_open_file_limit

from support import warm
from support.isolation import MARK, processes_of
from support.warm_server import LIFE

LOOK = """
import asyncio, json, os, random, signal, sys, threading
print(json.dumps({
    "argv": sys.argv,
    "name": __name__,
    "environment": dict(os.environ),
    "cwd": os.getcwd(),
    "files": sorted(os.listdir("/proc/self/fd"))[:-1] if os.path.exists("/proc/self/fd") else [],
    "threads": threading.active_count(),
    "group": os.getpgrp(),
    "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "woken": signal.set_wakeup_fd(-1),
    "read": sys.stdin.read(),
}))
sys.stderr.write("error")
sys.exit(7)
"""


FD_SETSIZE = 1024
"""Of `select`."""

SLEEP = "import time; time.sleep(600)"


def seen(done: subprocess.CompletedProcess[bytes]) -> dict[str, object]:
    assert (done.returncode, done.stderr) == (7, b"error")
    value = json.loads(done.stdout)
    value["environment"].pop("LC_CTYPE", None)
    assert isinstance(value, dict)
    return value


def test_it_gets_what_a_new_process_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", LOOK, "one", "\udcff"]
    warm.run([sys.executable, "-c", "pass"], timeout_s=60.0)
    monkeypatch.chdir(tmp_path)  # after the server was started in another folder
    environment = {**os.environ, "NEW": "new"}
    environment.pop("HOME", None)
    new = subprocess.run(command, input=b"text", capture_output=True, env=environment, check=False)
    with Path(os.devnull).open("r+b") as nothing:
        beside = warm.start([sys.executable, "-c", SLEEP], (nothing,) * 3)
    warm_one = warm.run(command, stdin=b"text", environment=environment, timeout_s=60.0)
    beside.kill()
    beside.wait()
    assert seen(warm_one) == seen(new)


def test_each_has_numbers_of_its_own() -> None:
    command = [sys.executable, "-c", "import random; print(random.random())"]
    assert len({warm.run(command, timeout_s=60.0).stdout for _ in range(3)}) == 3


def test_a_signal_to_one_whose_end_is_not_told_yet_is_harmless() -> None:
    """As with subprocess.Popen: it may have been reaped a moment ago."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    told, teller = os.pipe()
    os.write(teller, LIFE.pack(gone.pid))
    process = warm.WarmProcess(["-c", ""], told)
    process.kill()
    assert process.poll() is None
    os.write(teller, LIFE.pack(-signal.SIGKILL))
    os.close(teller)
    assert process.wait(60.0) == -signal.SIGKILL


def test_its_life_is_told() -> None:
    with Path(os.devnull).open("r+b") as nothing:
        command = [sys.executable, "-c", SLEEP]
        first, second = (warm.start(command, (nothing,) * 3) for _ in range(2))
    assert first.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.01)
    run = os.environ[MARK]
    assert {p.pid for p in processes_of(run)} == {first.pid, second.pid}, "and not the server"
    assert psutil.Process(first.pid).create_time() > psutil.Process().create_time()
    first.terminate()
    assert first.wait(60.0) == first.poll() == first.returncode == -signal.SIGTERM
    assert second.poll() is None
    second.kill()
    assert second.wait() == -signal.SIGKILL
    second.kill()
    assert not psutil.pid_exists(first.pid)


def test_it_needs_no_small_file_descriptor() -> None:
    raise_open_file_limit(1)
    with ExitStack() as stack:
        for _ in range(FD_SETSIZE):
            stack.enter_context(Path(os.devnull).open("rb"))
        assert warm.run([sys.executable, "-c", ""], timeout_s=60.0).returncode == 0


def test_who_takes_too_long_is_ended() -> None:
    command = [sys.executable, "-c", SLEEP]
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run(command, timeout_s=0.5)
    assert processes_of(os.environ[MARK]) == []


def test_what_concerns_the_start_of_an_interpreter_gets_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [sys.executable, "-m", "mlxsup.cli", "status"]
    here = dict(os.environ)
    assert warm.is_warm(line, here | {"TERM": "dumb", "PYTHONUNBUFFERED": ""})
    assert not warm.is_warm(["sh", "-c", "exec true"], here)
    assert not warm.is_warm([sys.executable, "-m", "mlxsup.worker"], here)
    assert not warm.is_warm([sys.executable, "-P", "-m", "mlxsup.cli"], here)
    for name in ("PYTHONDEVMODE", "PYTHONWARNINGS", "LC_ALL", "COVERAGE_PROCESS_START"):
        assert not warm.is_warm(line, here | {name: "value"})
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert not warm.is_warm(line, os.environ), "the server did not begin with it"
    assert warm.is_warm(line, here)
    monkeypatch.setattr(warm, "SERVER", warm.WarmServer())
    assert not warm.is_warm(line, here), "figures are measured without it"
    script = "import sys; print(sys.flags.dev_mode)"
    command, environment = [sys.executable, "-c", script], here | {"PYTHONDEVMODE": "1"}
    assert warm.run(command, environment=environment, timeout_s=60.0).stdout == b"True\n"


def test_nothing_of_the_server_would_be_inherited() -> None:
    look = (
        "import gc, sys, zmq\n"
        "gc.unfreeze()\n"
        "assert not [o for o in gc.get_objects() if isinstance(o, zmq.Context)]\n"
        "assert 'mlxsup.supervisor.daemon' in sys.modules\n"
        "assert 'mlxsup.cli.commands.status' in sys.modules\n"
        "assert not {'mlx', 'mlx_lm', 'transformers', 'numpy', 'pytest'} & set(sys.modules)\n"
    )
    done = warm.run_text([sys.executable, "-c", look], timeout_s=60.0)
    assert (done.returncode, done.stderr) == (0, "")
    assert psutil.Process(warm.SERVER.pid).num_threads() == 1
