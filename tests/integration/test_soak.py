"""The quick version of `make soak`, leaks that it must see, and disks that are full (J4)."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from soak.curves import PICTURES
from soak.run import Soak, soak
from soak.samples import MAX_GROWTH_MB
from support.verdict import EXIT_CODES, NotShown, Verdict, verdict_of

TESTS = Path(__file__).parents[1]
SERIES = {
    f"{what} of {name}"
    for what in ("RSS in MB", "files", "sockets", "threads", "mapped files")
    for name in ("supervisor", "fake", "real")
} | {"processes", "zombies", "rows"}


def short(out: Path, sabotage: str = "", patience_s: float = 60.0) -> Soak:
    """With the fake engine alone, as short as a soak can be."""
    return soak(
        0.0, 1, out=out, every_s=0.0, is_real=False, sabotage=sabotage, patience_s=patience_s
    )


@pytest.mark.mlx
def test_nothing_grows_in_ordinary_use_J4(tmp_path: Path) -> None:
    # In so short a run the real worker still fills the memory that it keeps prompts in.
    result = soak(0.1, seed=1, out=tmp_path, every_s=0.0, growth_mb=MAX_GROWTH_MB | {"real": 40.0})
    assert result.problems == []
    last = result.samples[-1]
    assert last.requests == 24 * result.turns >= 24 * 8
    assert set(last.values) >= SERIES
    assert {(one.values["rows"], one.values["zombies"]) for one in result.samples} == {(0, 0)}
    assert {one.values["processes"] for one in result.samples} == {4}
    for what in ("files", "sockets", "threads"):
        assert len({one.values[f"{what} of supervisor"] for one in result.samples[2:]}) == 1
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["requests"] for line in lines] == [s.requests for s in result.samples]
    table = (tmp_path / "soak.md").read_text()
    assert all(f"| {one.name} |" in table for one in result.curves)
    for name in PICTURES:
        assert f"](soak-{name}.svg)" in table
        root = ElementTree.fromstring((tmp_path / f"soak-{name}.svg").read_text())
        points = [line.get("points", "") for line in root.iter() if line.tag.endswith("polyline")]
        assert max(len(line.split()) for line in points) == len(result.samples)


PER_MESSAGE = """
from mlxsup.supervisor.sockets.clients import Clients
take, kept = Clients._take, []
def planted(self, connection, frames):
    if b"generate" in frames[0]:
        {body}
    take(self, connection, frames)
Clients._take = planted
"""
LEAKS = {
    "a file that is never closed": (
        PER_MESSAGE.format(body="kept.append(open('/dev/null'))"), "files of supervisor: between"),
    "a list that grows": (
        PER_MESSAGE.format(body="kept.append(b'x' * 200_000)"), "RSS in MB of supervisor: grew by"),
}  # fmt: skip
SLOW_LEAKS = {
    "a thread for each request": (
        "import threading, time\n" + PER_MESSAGE.format(
            body="threading.Thread(target=time.sleep, args=(999,), daemon=True).start()"),
        "threads of supervisor: between"),
    "a socket that is never closed": (
        "import socket\n" + PER_MESSAGE.format(body="kept.append(socket.socket(socket.AF_UNIX))"),
        "sockets of supervisor: between"),
    "a file that stays mapped": (
        "import mmap, tempfile\n" + PER_MESSAGE.format(
            body="file = tempfile.TemporaryFile(); file.write(b'x' * 4096); file.flush();"
                 " kept.append(mmap.mmap(file.fileno(), 0))"),
        "mapped files of supervisor: between"),
    "a child that nobody reaps": (
        "import os\n" + PER_MESSAGE.format(
            body="len(kept) < 5 and kept.append(os.posix_spawn('/bin/true', ['true'], {}))"),
        "zombies: 5, at most 0"),
    "a log that is never renamed": (
        """
from mlxsup.supervisor import log_files
from mlxsup.supervisor.log_files import RotatingFile
log_files.MAX_WAITING_BYTES = 2**40
begin = RotatingFile.__init__
def begun(self, path, report, max_bytes=0):
    begin(self, path, report, max_bytes=2**60)
RotatingFile.__init__ = begun
"""
        + PER_MESSAGE.format(body="written[0].write('info', 'x' * 200_000)")
        + """
from mlxsup.supervisor.logs import DaemonLog
init, written = DaemonLog.__init__, []
def opened(self, *arguments, **more):
    init(self, *arguments, **more)
    written.append(self)
DaemonLog.__init__ = opened
""", "log in MB of mlxsup"),
    "an answer that is not the right one": (
        """
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.protocol.client_messages import Deltas
send, seen = Clients.send, []
def planted(self, connection, message):
    if isinstance(message, Deltas):
        seen.append(1)
        if len(seen) == 100:
            message.deltas[0].tokens = message.deltas[0].tokens[::-1]
    send(self, connection, message)
Clients.send = planted
""", " instead of "),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("leak", [*LEAKS, *SLOW_LEAKS])
def test_a_leak_planted_in_the_supervisor_is_seen_J4(tmp_path: Path, leak: str) -> None:
    sabotage, seen = (LEAKS | SLOW_LEAKS)[leak]
    problems = short(tmp_path, sabotage).problems
    assert [one for one in problems if seen in one], problems


@pytest.mark.slow
def test_a_row_that_is_never_removed_is_seen_J4(tmp_path: Path) -> None:
    sabotage = """
from mlxsup.supervisor.core.model import Model
class Kept(dict):
    ended = 0
    def __delitem__(self, key):
        Kept.ended += 1
        if Kept.ended != 30:
            dict.__delitem__(self, key)
init = Model.__init__
def planted(self, *arguments, **more):
    init(self, *arguments, **more)
    self.running = Kept(self.running)
Model.__init__ = planted
"""
    # The watchdog may find it first, and replace the worker that does not hold that row; or the row
    # gets a token, and the core ends with a request that it does not have.
    seen = r"quiet was still False|was replaced|the daemon ended with 70"
    with pytest.raises(AssertionError, match=seen):
        short(tmp_path, sabotage, patience_s=20.0)


@pytest.mark.slow
def test_a_full_disk_of_the_logs_shows_nothing_J4(tmp_path: Path) -> None:
    sabotage = """
import errno, os, stat
write = os.write
def refused(descriptor, data):
    seen = os.fstat(descriptor)
    if stat.S_ISREG(seen.st_mode) and seen.st_size > 400:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return write(descriptor, data)
os.write = refused
"""
    with pytest.raises(NotShown, match="lines of a log were lost"):
        short(tmp_path, sabotage)


@pytest.mark.slow
def test_a_daemon_that_dies_of_outside_causes_shows_nothing_J4(tmp_path: Path) -> None:
    strike = "kept.append(1); len(kept) == 100 and os.kill(os.getpid(), 9)"
    sabotage = "import os\n" + PER_MESSAGE.format(body=strike)
    with pytest.raises(NotShown, match="ended from outside, exit status -9"):
        short(tmp_path, sabotage)


@pytest.mark.skipif(sys.platform != "linux", reason="a limit of another platform's kernel")
@pytest.mark.slow
def test_a_full_disk_of_the_figures_shows_nothing_J4(tmp_path: Path) -> None:
    """The limit holds for the daemon too, whose logs stay below it."""
    whole = tmp_path / "whole"
    assert short(whole).problems == []
    size = (whole / "samples.jsonl").stat().st_size
    arguments = ["--minutes", "0", "--every", "0", "--out", str(tmp_path / "cut")]
    ended = subprocess.run(
        [sys.executable, "-m", "soak", "--fake", *arguments],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, size - 100)),
        check=False,
    )
    assert "cut cannot be written: File too large" in ended.stdout, ended.stdout + ended.stderr
    assert ended.returncode == EXIT_CODES[Verdict.NOT_SHOWN]
    assert verdict_of(ended.returncode) is Verdict.NOT_SHOWN
