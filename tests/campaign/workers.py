"""P3 to P8, P14, P21, P23, P32: workers die, stop, get stuck, or only look so."""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import psutil

from mlxsup.client import Client, ConnectionLost

from .oracle import must_be_whole
from .scenario import (
    CPU,
    FAKE,
    Figure,
    Place,
    Scenario,
    Values,
    at_most,
    at_most_beside,
    count,
    equals,  # fmt: skip
    median_at_most,
    p99_at_most,
)
from .watch import (
    SOON,
    Changes,
    Crowd,
    Daemon,
    ExitWatch,
    TimedReader,
    burning,
    require,
    serving,  # fmt: skip
)
from support.client.lossy import LossyDaemon
from support.daemon.daemon import fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

Entry = Callable[[Place], dict[str, Any]]


def fake_entry(place: Place, step_s: float = 0.01, rows: int = 8) -> dict[str, Any]:
    """Return the entry of a fake model that may die again and again."""
    return fake(fake={"step_s": step_s}, max_concurrency=rows, restart=SOON)


def real_entry(place: Place, rows: int = 8) -> dict[str, Any]:
    """Return the entry of the tiny model on the CPU."""
    return {"path": str(place.tiny), "preload": True, "restart": SOON, "max_concurrency": rows}


# ---------------------------------------------------------------- P3, P5, P8

ROWS = 64


def news_of_crashes(place: Place) -> Values:
    """P3: from the end of a process with 64 rows to the state change, as a client hears of it."""
    longest = 3_000_000
    # What a row has said is read again after each crash, in one step however long it has become.
    options = {"step_s": 0.005, "context_length": longest, "prefill_tokens_per_step": longest}
    known_ms = []

    def all_run() -> bool:
        seen = row(client, "m")
        return len(seen["running"]) == ROWS and seen["steps"] > ROWS + 8

    with serving({"m": fake(fake=options, max_concurrency=ROWS, restart=SOON)}) as (daemon, client):
        changes = Changes(client)
        # Their reader is another process, so that this one hears of the change in time.
        with Crowd("reading", daemon.endpoint, "m", "row", ROWS):
            for _ in range(place.size(100, small=2)):
                eventually(all_run, timeout_s=60.0)
                before = row(client, "m")
                watch = ExitWatch(before["pid"])
                os.kill(before["pid"], signal.SIGKILL)
                known_at = changes.left_ready_at("m", before["generation"])
                known_ms.append(1000 * (known_at - watch.ended_at()))
    return {"known": known_ms}


def replaced(place: Place, *, entry: Entry, number: signal.Signals, tokens: int) -> Values:
    """P5, P8: from a signal in the middle of an answer to READY, and a cold load."""
    with serving({"m": entry(place)}) as (_, client):
        right = client.complete("m", prompt="continues", max_tokens=tokens).token_ids
        client.unload("m")
        start_s = time.monotonic()
        client.load("m")
        cold_s = time.monotonic() - start_s
        changes = Changes(client)
        stream = TimedReader(client, "m", "continues", max_tokens=tokens).started()
        before = row(client, "m")
        start_s = time.monotonic()
        os.kill(before["pid"], number)
        ready_s = changes.ready_at("m", before["generation"] + 1) - start_s
        assert not psutil.pid_exists(before["pid"]), "the process is still there"
        must_be_whole(stream, right)
        assert row(client, "m")["suspects"] == 0
    return {"cold": cold_s, "ready": ready_s}


# ---------------------------------------------------------------- P4

STEP_S = 0.025


def missed_steps(times: Sequence[float], step_s: float) -> int:
    """Return the steps without a token; a gap shorter than two steps misses none."""
    return sum(max(0, int((after - before) / step_s) - 1) for before, after in pairwise(times))


def crash_first(client: Client) -> None:
    """Strike the other worker's neighbour."""
    os.kill(row(client, "first")["pid"], signal.SIGSEGV)


def neighbour(place: Place, *, entry: Entry, tokens: int, step_s: float | None) -> Values:
    """P4: another worker's stream, while the first lives and while it dies and loads."""
    models = {"first": entry(place), "other": entry(place)}
    with serving(models) as (_, client):
        client.complete("other", prompt="neighbour", max_tokens=tokens // 10)
        changes, streams = Changes(client), list[TimedReader]()
        for is_struck in (False, True):
            first = TimedReader(client, "first", "busy", max_tokens=tokens)
            other = TimedReader(client, "other", "neighbour", max_tokens=tokens).started()
            first.started()
            if is_struck:
                crash_first(client)
            for reader in (other, first):
                reader.finished(300.0)
            streams.append(other)
        calm, struck = streams
        is_late = changes.ready_at("first", 2) < struck.ended_at
        require(is_late, "the other stream had ended before the first model was loaded again")
        must_be_whole(struck, calm.tokens)
        assert row(client, "other")["generation"] == 1
    gaps = calm.largest_gap_ms, struck.largest_gap_ms
    values: dict[str, float | list[float]] = {
        "without": gaps[0], "gap": gaps[1], "ratio": gaps[1] / gaps[0]}  # fmt: skip
    if step_s is not None:
        own = missed_steps(calm.times, step_s)
        require(own == 0, f"the machine is too busy: undisturbed, the stream missed {own} steps")
        values |= {"missed": missed_steps(struck.times, step_s), "missed_without": own}
    return values


GAPS = (
    Figure("gap", "largest gap of the other worker's stream while the first dies and loads; same"
           " tokens", "ms", without="without"),
    Figure("ratio", "the same: with / without", "", median_at_most(2.0)),
)  # fmt: skip


# ---------------------------------------------------------------- P6, P23

LIMIT_S = 2.0
STALLS = {"sleep": "sleeps", "busy": "computes in Python", "gil": "holds the interpreter"}
FAULTS = {f"stall-{how}": (f"stall={how} at=9", f"its step never ends, {name}")
          for how, name in STALLS.items()} | {
    "drop": ("link=drop at=9", "its connection ends"),
    "oversized": ("frames=oversized at=9", "a frame too large ends its connection"),
    "insert": ("stall=sleep during=insert", "it is stuck in an insert"),
    "between": ("stall=sleep during=bytes_held at=9", "it is stuck between two steps"),
    "engine": ("row=lost at=9", "its engine loses a row"),
    "beats": ("beats=end at=9", "its heartbeats end"),
}  # fmt: skip
LOSSES = {"running": "its loop loses a row", "messages": "its messages vanish on the way"}


def noticed(place: Place) -> Values:
    """P6, P23: from the last sign of its work until the supervisor acts; each stream continues."""
    entry = fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S, restart=SOON)
    with Daemon({"m": entry}) as daemon:
        found_s = {key: found_after(daemon, fault) for key, (fault, _) in FAULTS.items()}
        assert "most recent call first" in daemon.log_text(), "no stacks in the worker's log"
    for what in LOSSES:
        with LossyDaemon(what, {"m": entry}) as lossy:
            found_s[what] = found_after(lossy, "")
    return found_s


def found_after(daemon: Daemon | LossyDaemon, fault: str) -> float:
    """Return how long a fault went unnoticed."""
    with daemon.client() as client:
        changes = Changes(client)
        generation = wait_for_state(client, "m", "READY")["generation"]
        prompt = f"[[fault {fault} generation={generation}]]"
        asked_at = time.monotonic()
        stream = TimedReader(client, "m", prompt, max_tokens=30)
        must_be_whole(stream, undisturbed(prompt, 30))
        assert stream.finished().resumed <= 1
        acted_at = changes.left_ready_at("m", generation)
        return acted_at - max([asked_at, *(t for t in stream.times if t < acted_at)])


# ---------------------------------------------------------------- P7, P32


def alive_all(workers: Sequence[psutil.Process]) -> int:
    """Return how many of these processes live no more."""
    return sum(not is_alive(worker) for worker in workers)


def workers_of(client: Client, *models: str) -> list[psutil.Process]:
    """Return their processes, which the kernel knows by more than their ids."""
    return [psutil.Process(row(client, name)["pid"]) for name in models]


def paused_tree(place: Place) -> Values:
    """P7: the whole tree is stopped, and continues."""
    with serving({"m": fake(fake={"step_s": 0.02}, step_timeout_s=1.0)}) as (daemon, client):
        workers = workers_of(client, "m")
        stream = TimedReader(client, "m", "paused", max_tokens=300).started()
        # This process is the client, and is not stopped: so it misses the supervisor.
        tree = daemon.processes()
        for process in tree:
            process.suspend()
        time.sleep(place.size(60, small=6))  # the pause itself
        for process in tree:
            process.resume()
        stream.join(60.0)
        with daemon.client() as again:
            again.complete("m", prompt="serves", max_tokens=100)
        return {"kills": alive_all(workers)}


def busy_machine(place: Place) -> Values:
    """P32: thirty burning processes, next to which the daemon is the least important."""
    with serving({"m": fake(fake={"step_s": 0.01})}) as (daemon, client):
        workers = workers_of(client, "m")
        for process in daemon.processes():
            process.nice(15)
        with burning(place.size(30, small=8)):
            readers = [TimedReader(client, "m", f"{n}", max_tokens=50) for n in range(8)]
            for reader in readers:
                reader.join(600.0)
        lost = sum(isinstance(reader.error, ConnectionLost) for reader in readers)
        return {"lost": lost, "kills": alive_all(workers)}


# ---------------------------------------------------------------- P14


def crash_cycles(place: Place) -> Values:
    """P14: a worker with four streams is killed again and again, which leaves nothing."""
    cycles, prompts = place.size(1000, small=10), [f"stream {number}" for number in range(4)]
    options = {"step_s": 0.005, "context_length": 10_000_000}
    entry = fake(fake=options, max_concurrency=len(prompts), restart=SOON)
    with serving({"m": entry}) as (daemon, client):
        main = daemon.main
        streams = [TimedReader(client, "m", one, max_tokens=1_000_000) for one in prompts]
        for stream in streams:
            stream.started()

        def gained(had: list[int]) -> bool:
            return all(len(s.tokens) > n for s, n in zip(streams, had, strict=True))

        def cycle() -> None:
            before = row(client, "m")
            os.kill(before["pid"], signal.SIGKILL)
            eventually(lambda: row(client, "m")["generation"] > before["generation"])
            wait_for_state(client, "m", "READY")
            had = [len(stream.tokens) for stream in streams]
            eventually(lambda: gained(had), timeout_s=60.0, what="a new token of each stream")

        def held() -> tuple[int, int, float]:
            return main.num_fds(), main.num_threads(), main.memory_info().rss / 1e6

        warm_up = place.size(20, small=3)
        for _ in range(warm_up):
            cycle()
        files, threads, rss_mb = held()
        start_s = time.monotonic()
        for _ in range(cycles):
            cycle()
        cycle_s = (time.monotonic() - start_s) / cycles
        zombies = sum(p.status() == psutil.STATUS_ZOMBIE for p in main.children())
        files_after, threads_after, rss_mb_after = held()
        for stream in streams:
            stream.stream.cancel()
        for stream, prompt in zip(streams, prompts, strict=True):
            right = undisturbed(prompt, len(stream.finished().token_ids))
            must_be_whole(stream, right, may_be_cut=True)
        resumed = {stream.finished().resumed for stream in streams}
        assert resumed == {warm_up + cycles}, resumed
    return {"zombies": zombies, "files": files_after - files, "threads": threads_after - threads,
            "rss": rss_mb_after - rss_mb, "cycle": cycle_s}  # fmt: skip


# ---------------------------------------------------------------- P21


def grown(values: Sequence[float]) -> float:
    """Return by how much the median of the last third is above that of the first."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


def unloads(place: Place) -> Values:
    """P21: after each unload everything is looked at from outside; the first three only warm up."""
    supervisor_mb, worker_mb = [], []
    left = reserved = 0
    with Daemon({"m": real_entry(place) | {"preload": False}}) as daemon, daemon.client() as client:
        main = daemon.main
        for number in range(3 + place.size(50, small=4)):
            client.load("m")
            client.complete("m", prompt="x", max_tokens=4)
            [worker] = workers_of(client, "m")
            now_mb = worker.memory_info().rss / 1e6
            client.unload("m")
            left += is_alive(worker) + len(main.children(recursive=True))
            reserved += client.status()["memory"]["reserved_bytes"]
            if number >= 3:
                worker_mb.append(now_mb)
                supervisor_mb.append(main.memory_info().rss / 1e6)
    return {"left": left, "reserved": reserved, "worker": statistics.median(worker_mb),
            "supervisor": grown(supervisor_mb), "grown": grown(worker_mb)}  # fmt: skip


# ---------------------------------------------------------------- all of them


def _replaced(name: str, promise: str, where: str, entry: Entry, number: signal.Signals,
              more_s: float) -> Scenario:  # fmt: skip
    run = partial(replaced, entry=entry, number=number, tokens=500)
    what = f"{number.name} to READY in a new process (without: a cold load); its stream resumes"
    figure = Figure("ready", what, bound=at_most_beside("cold", more_s), without="cold")
    return Scenario(
        name=name, promises=promise, where=where, rounds=5, run=run, figures=(figure,)
    )  # fmt: skip


def _kills(name: str, promise: str, run: Callable[[Place], Values], what: str, rounds: int = 5,
           *more: Figure) -> Scenario:  # fmt: skip
    figures = (*more, count("kills", f"false kills: {what}"))
    return Scenario(
        name=name, promises=promise, where=FAKE, rounds=rounds, run=run, figures=figures
    )  # fmt: skip


def _steps(place: Place) -> dict[str, Any]:
    return fake_entry(place, STEP_S)


SCENARIOS = (
    Scenario(name="news", promises="P3", where=FAKE, rounds=5, run=news_of_crashes, figures=(
        Figure("known", "from the exit of a worker with 64 running rows to the news of it", "ms",
               p99_at_most(50.0)),)),
    Scenario(name="neighbour", promises="P4", where=FAKE, rounds=5,
             run=partial(neighbour, entry=_steps, tokens=120, step_s=STEP_S), figures=(
        Figure("missed", f"steps of {1000 * STEP_S:g} ms that the other worker's stream misses"
               " while the first dies and loads", "", equals(0, is_exact=False), "missed_without"),
        *GAPS)),
    Scenario(name="neighbour-mlx", promises="P4", where=CPU, rounds=5, figures=GAPS,
             run=partial(neighbour, entry=real_entry, tokens=2000, step_s=None)),
    _replaced("stopped", "P5", FAKE, fake_entry, signal.SIGSTOP, 6.0),
    _replaced("stopped-mlx", "P5", CPU, real_entry, signal.SIGSTOP, 6.0),
    _replaced("killed-mlx", "P8", CPU, real_entry, signal.SIGKILL, 1.0),
    Scenario(name="noticed", promises="P6 P23", where=FAKE, run=noticed, figures=tuple(
        Figure(key, f"a worker that lives, step limit 2 s: {name}: until it is noticed; the stream"
               " continues, token for token",
               bound=at_most(LIMIT_S + (1.0 if key.startswith("stall") else 2.0)))
        for key, name in [*((k, n) for k, (_, n) in FAULTS.items()), *LOSSES.items()])),
    _kills("pause", "P7", paused_tree,
           "SIGSTOP of the whole tree for 60 s, then SIGCONT; step limit 1 s", 1),
    _kills("busy", "P32", busy_machine, "the same", 5,
           count("lost", "30 burning processes, the daemon at nice 15: of 8 streams, those that"
                 " call it lost")),
    Scenario(name="cycles", promises="P14", where=FAKE, rounds=1, run=crash_cycles, figures=(
        count("zombies", "1,000 crashes of a worker with 4 streams, each of which has every token"
              " and 1,000 resumes: zombies"),
        count("files", "the same: open files more"),
        count("threads", "the same: threads more"),
        Figure("rss", "the same: supervisor RSS more", "MB", at_most(5.0)),
        Figure("cycle", "one crash until all streams continue, on average"))),
    Scenario(name="unloads", promises="P21", where=CPU, rounds=1, run=unloads, figures=(
        count("left", "50 × load, answer, unload: processes left after an unload"),
        count("reserved", "the same: bytes still reserved, all times together"),
        Figure("supervisor", "the same: supervisor RSS more, last third to first", "MB",
               at_most(5.0)),
        Figure("grown", "the same: a worker's RSS more, last third to first (without: its RSS)",
               "MB", at_most(5.0), "worker"))),
)  # fmt: skip
