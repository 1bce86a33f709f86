"""P7: the wall clock jumps by an hour, both ways, under real processes.

Setting the clock needs root, so the processes are given another one: a library that the loader puts
before libc (`LD_PRELOAD`) adds an offset to the time of day and to nothing else. The offset is read
from a file that all of them map, so that it changes under all of them at once.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from mlxsup.client import Client

from .bounds import at_most, equals
from .daemons import Daemon, ready
from .entries import SOON
from .false_kills import ended, kills, workers_of
from .measure import FAKE, Figure, Measure, Place, Values, require
from .watching import Changes, TimedReader
from support.daemon import fake, row
from support.eventually import eventually
from support.faults import undisturbed

HOUR_S = 3600
LIMIT_S = 1.0
SHIM = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t none = 0;
static volatile int64_t *offset_s = &none;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("MOVED_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *map = mmap(0, sizeof *offset_s, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) offset_s = map;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *offset_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}
"""


class MovedClock:
    """A time of day for child processes, which can be moved.

    Args:
        folder: for the library and the offset.

    Raises:
        NotShown: there is no compiler, or the loader does not take the library.
    """

    def __init__(self, folder: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        require(
            sys.platform == "linux" and compiler is not None,
            "moving the clock of a process needs Linux and a C compiler",
        )
        source, library, offset = folder / "shim.c", folder / "shim.so", folder / "offset"
        source.write_text(SHIM)
        subprocess.run(
            [str(compiler), "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True
        )
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "MOVED_CLOCK": str(offset)}
        self.move(HOUR_S)
        moved_s = self._asked() - time.time()
        self.move(0)
        require(abs(moved_s - HOUR_S) < HOUR_S / 2, "the loader does not take the library")

    def move(self, offset_s: int) -> None:
        """The time of day of all processes that have this clock, from now on."""
        self._offset[:8] = struct.pack("=q", offset_s)

    def _asked(self) -> float:
        done = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            check=True,
        )
        return float(done.stdout)


def moved_clock(place: Place) -> Values:
    """Streams while the clock jumps four times; then a stuck step, in which it jumps back again."""
    tokens = 400
    entry = fake(fake={"step_s": 0.01}, step_timeout_s=LIMIT_S, restart=SOON)
    with tempfile.TemporaryDirectory() as folder:
        clock = MovedClock(Path(folder))
        daemon = Daemon({"m": entry})
        try:
            daemon.start(environment=clock.environment)
            with daemon.client() as client:
                ready(client, "m")
                workers = workers_of(client, ["m"])
                wrong = 0
                for offset_s in (HOUR_S, 0, -HOUR_S, 0):
                    stream = TimedReader(client, "m", "clock", max_tokens=tokens).started()
                    clock.move(offset_s)
                    wrong += stream.finished().token_ids != undisturbed("clock", tokens)
                false_kills = ended(workers)
                found_s = stuck_at_a_jump(client, clock)
                crashed_at = moment_of(row(client, "m")["last_exit"]["at"])
                require(
                    abs(crashed_at - time.time() + HOUR_S) < HOUR_S / 2,
                    "the supervisor's clock was not moved",
                )
        finally:
            daemon.__exit__(*sys.exc_info())
    return {"kills": false_kills, "wrong": wrong, "found": found_s}


def stuck_at_a_jump(client: Client, clock: MovedClock) -> float:
    """From the last token before a stall until the supervisor acts."""
    changes, generation = Changes(client), row(client, "m")["generation"]
    prompt = f"[[fault stall=sleep at=9 generation={generation}]]"
    stuck = TimedReader(client, "m", prompt, max_tokens=20)
    eventually(lambda: len(stuck.tokens) == 8, timeout_s=30.0)
    clock.move(-HOUR_S)
    found_s = changes.left_ready_at("m", generation) - stuck.times[-1]
    assert stuck.finished().token_ids == undisturbed(prompt, 20)
    return found_s


def moment_of(said: float | str) -> float:
    """Seconds since the epoch, as `status` says them or in words."""
    return datetime.fromisoformat(said).timestamp() if isinstance(said, str) else said


MEASURES = (
    Measure(
        promise="P7",
        name="clock",
        where=FAKE,
        round=moved_clock,
        figures=(
            kills("the wall clock of all processes jumps by ±1 h, four times; step limit 1 s"),
            Figure(
                key="wrong",
                what="the same: streams with a token missing or wrong",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            Figure(
                key="found",
                what="it jumps by −1 h in a step that never ends, limit 1 s: until that is found",
                bound=at_most(LIMIT_S + 1.0),
            ),
        ),
    ),
)
