"""What one fault does to a daemon, in figures (P2 to P8, P13 to P15, P19, P21, P23, P29, P32).

Each scenario starts a daemon, strikes, and returns what it has measured for its figures.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import psutil

from mlxsup.client import Client, ConnectionLost

from .crowd import BIG
from .oracle import Answer, answer_of, must_be_whole, wrongs
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
    equals,
    median_at_most,
    p99_at_most,
    require,
)
from .watch import (
    SOON,
    Changes,
    Crowd,
    ExitWatch,
    TimedReader,
    burning,
    doomed,
    largest_gap_ms,
    main_process,
    peak_rss,
    serving,
)
from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, is_alive, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.gateway.http_daemon import STREAMED, HttpDaemon, SseReader, asked_at, chat, gateway_of
from support.gateway.large_bodies import hostile_bodies, send_all
from support.models.safetensors_files import llama_arrays, llama_config, write_folder

ONE_FAULT: list[Scenario] = []
Run = TypeVar("Run", bound=Callable[..., Values])
Entry = Callable[[Place], dict[str, Any]]


def scenario(
    name: str, promises: str, *figures: Figure, where: str = FAKE, rounds: int = 5
) -> Callable[[Run], Run]:
    """Register what a function measures."""

    def register(run: Run) -> Run:
        ONE_FAULT.append(Scenario(name, promises, where, rounds, run, figures))
        return run

    return register


def fake_entry(place: Place, step_s: float = 0.01) -> dict[str, Any]:
    """Return the entry of a fake model that may die again and again."""
    return fake(fake={"step_s": step_s}, max_concurrency=8, restart=SOON)


def real_entry(place: Place) -> dict[str, Any]:
    """Return the entry of the tiny model on the CPU."""
    return {"path": str(place.tiny), "preload": True, "restart": SOON, "max_concurrency": 8}


# ---------------------------------------------------------------- P1: kills

MODELS = ("m", "n")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP)
"""In turns: deaths from outside, which accuse no request."""
OVER = -1
STEPS = 40
"""Of a worker before it is struck: every row has gained tokens by then, and three deaths without a
token would end a request, as they must."""
LIMIT_S = 600.0
Readers = dict[str, list[SseReader | Reader]]

KILLED = (
    count("answers", "answers over the socket and all four HTTP APIs, 29 at once", None),
    count("signals", "signals that their workers get meanwhile", None),
    Figure("missing", "the same: strikes that came too late", "", equals(0, is_exact=False)),
    count("lost", "the same: answers that failed, were cut or ended twice"),
    count("unequal", "the same: answers with another token, text or number"),
)


def ask_all(daemon: HttpDaemon, client: Client, wave: int, tokens: int) -> Readers:
    """Ask everything of a wave at once, and return the answers by model."""
    answers: Readers = {name: [] for name in MODELS}
    for number in range(5):
        model = MODELS[number % len(MODELS)]
        for path in STREAMED:
            body = asked_at(path, f"{wave} {path} {number}", tokens) | {"model": model}
            answers[model].append(SseReader(daemon, body, path))
    for number in range(9):
        model = MODELS[number % len(MODELS)]
        sampled = {"temperature": 0.8, "seed": number} if number % 4 else {}
        answers[model].append(
            Reader(client, model, f"{wave} {number}", max_tokens=tokens, **sampled)
        )
    return answers


def answers_of(asked: Readers) -> list[Answer]:
    """Return all answers of a wave, once they have ended."""
    return [answer_of(one, LIMIT_S) for readers in asked.values() for one in readers]


def due(client: Client, asked: Readers, model: str, struck: set[int]) -> int | None:
    """Return the pid of a worker that is due; OVER once its model has nothing left to answer."""
    if not any(one.is_alive() for one in asked[model]):
        return OVER
    state = row(client, model)
    is_due = state["state"] == "READY" and state["steps"] >= STEPS and state["pid"] not in struck
    return int(state["pid"]) if is_due else None


def strike(client: Client, asked: Readers, strikes: int) -> int:
    """Signal the worker of one model after the other; return how many were due before the end."""
    struck: set[int] = set()
    for number in range(strikes):
        is_due = partial(due, client, asked, MODELS[number % len(MODELS)], struck)
        pid = eventually(is_due, timeout_s=LIMIT_S, what="a worker at work")
        if pid == OVER:
            return number
        struck.add(pid)
        os.kill(pid, SIGNALS[number % len(SIGNALS)])
    return strikes


@scenario("kills", "P1", *KILLED, where=CPU, rounds=1)
def kills(place: Place, *, is_real: bool = True) -> Values:
    """Ask in waves, undisturbed and then under signals, and compare the answers."""
    waves, per_wave = place.size(4, small=1), place.size(11, small=4)
    entry = real_entry(place) if is_real else fake_entry(place, 0.02)
    tokens = 800 if is_real else place.size(800, small=300)
    strikes = lost = unequal = total = 0
    models = dict.fromkeys(MODELS, entry | {"max_concurrency": 16})
    with HttpDaemon(models) as daemon, daemon.client() as client:
        for name in MODELS:
            wait_for_state(client, name, "READY", 120.0)
        for wave in range(waves):
            calm = answers_of(ask_all(daemon, client, wave, tokens))
            failed = [one.ends for one in calm if wrongs(one)]
            assert not failed, f"undisturbed answers ended with {failed}"
            asked = ask_all(daemon, client, wave, tokens)
            strikes += strike(client, asked, per_wave)
            got = answers_of(asked)
            total += len(got)
            for one, right in zip(got, calm, strict=True):
                found = wrongs(one, right.tokens, right.text)
                lost += any(what.startswith("ends") for what in found)
                unequal += any(not what.startswith("ends") for what in found)
    return {"answers": total, "signals": strikes, "lost": lost, "unequal": unequal,
            "missing": waves * per_wave - strikes}  # fmt: skip


scenario("kills-fake", "P1", *KILLED, rounds=1)(partial(kills, is_real=False))

# ---------------------------------------------------------------- P2, P4, P13, P19: the daemon

SLOW = {"step_s": 0.02}
ENDLESS = 4000
"""Tokens: more than a round waits for."""
HTTP = "8 streams over HTTP, of all four kinds"
LOST = "until the last of 8 streams has `ConnectionLost`"


def streams_of(client: Client, tokens: int, streams: int = 8) -> list[TimedReader]:
    """Return streams of the answers to `0`, `1` and so on, each with its first token."""
    readers = [TimedReader(client, "m", f"{n}", max_tokens=tokens) for n in range(streams)]
    return [reader.started() for reader in readers]


def http_streams(daemon: HttpDaemon) -> list[SseReader]:
    """Return two streams of every path, each with its first text."""
    asked = [(path, f"{path} {n}") for path in STREAMED for n in range(2)]
    readers = [SseReader(daemon, asked_at(path, what, ENDLESS), path) for path, what in asked]
    return [reader.started() for reader in readers]


@scenario(
    "lost", "P2",
    Figure("killed", f"supervisor SIGKILL: {LOST}", bound=at_most(3.5)),
    Figure("stopped", f"supervisor SIGSTOP: {LOST}", bound=at_most(3.5)),
)  # fmt: skip
def lost_connections(place: Place) -> Values:
    values = {}
    for key, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
        with doomed({"m": fake(fake=SLOW)}) as (daemon, client):
            readers = streams_of(client, ENDLESS)
            start_s = time.monotonic()
            main_process(daemon).send_signal(number)
            for reader in readers:
                reader.join(60.0)
                assert isinstance(reader.error, ConnectionLost), reader.error
            values[key] = max(reader.ended_at for reader in readers) - start_s
    return values


@scenario(
    "lost-http", "P2",
    Figure("lost", f"supervisor SIGKILL: until the last of {HTTP}, has its error event",
           bound=at_most(3.5)),
    count("whole", "the same: streams that a client would take for whole answers"),
    Figure("bound", "then from `mlxsup start` until the next gateway serves at the same port",
           bound=at_most(2.0)),
)  # fmt: skip
def http_daemon_dies(place: Place) -> Values:
    with HttpDaemon({"m": fake(fake=SLOW)}) as daemon:
        readers = http_streams(daemon)
        start_s = time.monotonic()
        daemon.kill()
        for reader in readers:
            reader.finished()
            assert "error" in reader.events[-1], reader.events[-1]
        lost_s = max(reader.last_at for reader in readers) - start_s
        whole = sum(reader.is_complete for reader in readers)
        daemon.listen = daemon.url.removeprefix("http://")
        start_s = time.monotonic()
        daemon.start()
        bound_s = time.monotonic() - start_s
        assert daemon.url.endswith(daemon.listen), "another port"
    return {"lost": lost_s, "whole": whole, "bound": bound_s}


@scenario(
    "gateway-dies", "P4",
    Figure("back", "gateway SIGKILL: until `/health` answers again; 4 streams over the socket do"
           " not notice", bound=at_most(2.0)),
    count("whole", f"the same: of {HTTP}, those that a client would take for whole"),
)  # fmt: skip
def gateway_dies(place: Place) -> Values:
    entry = fake(fake=SLOW, max_concurrency=16)
    with HttpDaemon({"m": entry}) as daemon, daemon.client() as client:
        streams, readers = streams_of(client, 250, 4), http_streams(daemon)
        pid = gateway_of(client)["pid"]
        start_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)

        def is_healthy() -> bool:
            try:  # the one that dies may still accept a connection
                return daemon.get("/health")[0] == 200
            except ConnectionError:
                return False

        eventually(is_healthy, timeout_s=30.0)
        back_s = time.monotonic() - start_s
        assert gateway_of(client, after=pid)["restarts"] == 1
        whole = sum(reader.finished().is_complete for reader in readers)
        for n, stream in enumerate(streams):
            must_be_whole(stream, undisturbed(f"{n}", 250))
            assert stream.finished().resumed == 0
        assert row(client, "m")["generation"] == 1
    return {"back": back_s, "whole": whole}


STEP_S = 0.05
WINDOWS = {"load": "loads", "prefill": "prefills", "decode": "decodes", "idle": "is idle",
           "stopped": "is stopped", "wedged": "is wedged, GIL held"}  # fmt: skip


@scenario("orphans", "P13", *(
    Figure(window, f"supervisor SIGKILL, worker {state}: from the signal to the last exit",
           bound=at_most(1.0)) for window, state in WINDOWS.items()))  # fmt: skip
def orphans(place: Place) -> Values:
    return {window: orphans_in(window) for window in WINDOWS}


def orphans_in(window: str) -> float:
    """Return how long the processes of a killed supervisor lived, by the kernel's own news."""
    options: dict[str, Any] = {"step_s": STEP_S, "prefill_tokens_per_step": 1}
    if window == "load":
        options["load_s"] = 30.0
    with doomed({"m": fake(fake=options)}) as (daemon, client):
        wait_for_state(client, "m", "LOADING" if window == "load" else "READY")
        eventually(lambda: row(client, "m")["pid"])
        readers = prepared(client, window)
        processes = daemon.processes()
        assert len(processes) == 2
        if window == "stopped":
            processes[1].suspend()
            eventually(lambda: processes[1].status() == psutil.STATUS_STOPPED)
        watches = [ExitWatch(process.pid) for process in processes]
        start_s = time.monotonic()
        main_process(daemon).kill()
        gone_s = max(watch.ended_at(window) for watch in watches) - start_s
        for reader in readers:
            reader.join(60.0)
    return gone_s


def prepared(client: Client, window: str) -> list[TimedReader]:
    """Bring the worker into the state."""
    prompts = {"prefill": "x" * 500, "decode": "x", "wedged": "[[fault stall=gil at=2]]"}
    if window not in prompts:
        return []
    reader = TimedReader(client, "m", prompts[window], max_tokens=1000)
    if window == "prefill":
        eventually(lambda: row(client, "m")["steps"] > 2)
    else:
        reader.started()

    def stands_still() -> bool:
        before = row(client, "m")["steps"]
        time.sleep(20 * STEP_S)  # the time in which twenty steps should end
        return bool(row(client, "m")["steps"] == before)

    if window == "wedged":
        eventually(stands_still, timeout_s=20.0)
    return [reader]


@scenario("starts", "P19", count(
    "others", "20 starts at once, 20 more while it streams, and the stream is whole: starts but the"
    " first that did not end with exit 75"), rounds=3)  # fmt: skip
def starts_at_once(place: Place) -> Values:
    daemon, quiet = Daemon({"m": fake(fake=SLOW)}), subprocess.DEVNULL
    wanted = place.size(20, small=4)
    started: list[subprocess.Popen[bytes]] = []

    def start_all() -> list[subprocess.Popen[bytes]]:
        command = daemon.command("start", "--config", str(daemon.config))
        new = [subprocess.Popen(command, stdout=quiet, stderr=quiet) for _ in range(wanted)]
        started.extend(new)
        return new

    try:
        first = start_all()
        eventually(lambda: sum(p.poll() is not None for p in first) == wanted - 1, timeout_s=120.0)
        [daemon.process] = survivors = [p for p in first if p.poll() is None]
        with daemon.client() as client:
            wait_for_state(client, "m", "READY", 120.0)
            stream = TimedReader(client, "m", "kept", max_tokens=600).started()
            codes = [p.wait(120.0) for p in start_all()]
            must_be_whole(stream, undisturbed("kept", 600))
            assert row(client, "m")["generation"] == 1
        codes += [p.returncode for p in first if p not in survivors]
        assert survivors[0].poll() is None
    finally:
        for process in started:
            if process is not daemon.process and process.poll() is None:
                process.kill()
        daemon.__exit__(None, None, None)
    return {"others": sum(code != 75 for code in codes)}


# ---------------------------------------------------------------- P3, P5, P8: dead workers

ROWS = 64


@scenario("news", "P3", Figure(
    "known", "from the exit of a worker with 64 running rows to the news of it", "ms",
    p99_at_most(50.0)))  # fmt: skip
def news_of_crashes(place: Place) -> Values:
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


def replaced(place: Place, *, entry: Entry, number: signal.Signals) -> Values:
    """Measure from a signal in the middle of an answer to READY, and a cold load."""
    with serving({"m": entry(place)}) as (_, client):
        right = client.complete("m", prompt="continues", max_tokens=500).token_ids
        client.unload("m")
        start_s = time.monotonic()
        client.load("m")
        cold_s = time.monotonic() - start_s
        changes = Changes(client)
        stream = TimedReader(client, "m", "continues", max_tokens=500).started()
        before = row(client, "m")
        start_s = time.monotonic()
        os.kill(before["pid"], number)
        ready_s = changes.ready_at("m", before["generation"] + 1) - start_s
        assert not psutil.pid_exists(before["pid"]), "the process is still there"
        must_be_whole(stream, right)
        assert row(client, "m")["suspects"] == 0
    return {"cold": cold_s, "ready": ready_s}


for _name, _promise, _where, _entry, _number, _more_s in (
    ("stopped", "P5", FAKE, fake_entry, signal.SIGSTOP, 6.0),
    ("stopped-mlx", "P5", CPU, real_entry, signal.SIGSTOP, 6.0),
    ("killed-mlx", "P8", CPU, real_entry, signal.SIGKILL, 1.0),
):
    _what = f"{_number.name} to READY in a new process (without: a cold load); its stream resumes"
    _figure = Figure("ready", _what, bound=at_most_beside("cold", _more_s), without="cold")
    scenario(_name, _promise, _figure, where=_where)(
        partial(replaced, entry=_entry, number=_number)
    )

# ---------------------------------------------------------------- P4: a neighbour

GAPS = (
    Figure("gap", "largest gap of the other worker's stream while the first dies and loads; same"
           " tokens", "ms", without="without"),
    Figure("ratio", "the same: with / without", "", median_at_most(2.0)),
)  # fmt: skip
NEIGHBOUR_STEP_S = 0.025


def missed_steps(times: Sequence[float], step_s: float) -> int:
    """Return the steps without a token; a gap shorter than two steps misses none."""
    return sum(max(0, int((after - before) / step_s) - 1) for before, after in pairwise(times))


def crash_first(client: Client) -> None:
    """Strike the other worker's neighbour."""
    os.kill(row(client, "first")["pid"], signal.SIGSEGV)


@scenario("neighbour-mlx", "P4", *GAPS, where=CPU)
def neighbour(
    place: Place, *, entry: Entry = real_entry, tokens: int = 2000, step_s: float | None = None
) -> Values:
    """Read another worker's stream, while the first lives and while it dies and loads."""
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


scenario(
    "neighbour", "P4",
    Figure("missed", f"steps of {1000 * NEIGHBOUR_STEP_S:g} ms that the other worker's stream"
           " misses while the first dies and loads", "", equals(0, is_exact=False),
           "missed_without"), *GAPS,
)(partial(neighbour, entry=partial(fake_entry, step_s=NEIGHBOUR_STEP_S), tokens=120,
          step_s=NEIGHBOUR_STEP_S))  # fmt: skip

# ---------------------------------------------------------------- P6, P23: stuck workers

STEP_LIMIT_S = 2.0
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


@scenario("noticed", "P6 P23", *(
    Figure(key, f"a worker that lives, step limit 2 s: {name}: until it is noticed; the stream"
           " continues, token for token",
           bound=at_most(STEP_LIMIT_S + (1.0 if key.startswith("stall") else 2.0)))
    for key, name in [*((k, n) for k, (_, n) in FAULTS.items()), *LOSSES.items()]),
    rounds=3)  # fmt: skip
def noticed(place: Place) -> Values:
    """Measure from the last sign of its work until the supervisor acts."""
    entry = fake(fake={"step_s": 0.02}, step_timeout_s=STEP_LIMIT_S, restart=SOON)
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


# ---------------------------------------------------------------- P7, P32: false kills


def dead(workers: Sequence[psutil.Process]) -> int:
    """Return how many of these processes live no more."""
    return sum(not is_alive(worker) for worker in workers)


@scenario("pause", "P7", count(
    "kills", "false kills: SIGSTOP of the whole tree for 60 s, then SIGCONT; step limit 1 s"),
    rounds=1)  # fmt: skip
def paused_tree(place: Place) -> Values:
    with serving({"m": fake(fake={"step_s": 0.02}, step_timeout_s=1.0)}) as (daemon, client):
        workers = [psutil.Process(row(client, "m")["pid"])]
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
        return {"kills": dead(workers)}


@scenario(
    "busy", "P32",
    count("lost", "30 burning processes, the daemon at nice 15: of 8 streams, those that call it"
          " lost"),
    count("kills", "false kills: the same"),
)  # fmt: skip
def busy_machine(place: Place) -> Values:
    with serving({"m": fake(fake={"step_s": 0.01})}) as (daemon, client):
        workers = [psutil.Process(row(client, "m")["pid"])]
        for process in daemon.processes():
            process.nice(15)
        with burning(place.size(30, small=8)):
            readers = [TimedReader(client, "m", f"{n}", max_tokens=50) for n in range(8)]
            for reader in readers:
                reader.join(600.0)
        lost = sum(isinstance(reader.error, ConnectionLost) for reader in readers)
        return {"lost": lost, "kills": dead(workers)}


# ---------------------------------------------------------------- P14, P21: leaks


@scenario(
    "cycles", "P14",
    count("zombies", "1,000 crashes of a worker with 4 streams, each of which has every token and"
          " 1,000 resumes: zombies"),
    count("files", "the same: open files more"),
    count("threads", "the same: threads more"),
    Figure("rss", "the same: supervisor RSS more", "MB", at_most(5.0)),
    Figure("cycle", "one crash until all streams continue, on average"),
    rounds=1,
)  # fmt: skip
def crash_cycles(place: Place) -> Values:
    """Kill a worker with four streams again and again, which leaves nothing."""
    cycles, prompts = place.size(1000, small=10), [f"stream {number}" for number in range(4)]
    options = {"step_s": 0.005, "context_length": 10_000_000}
    entry = fake(fake=options, max_concurrency=len(prompts), restart=SOON)
    with serving({"m": entry}) as (daemon, client):
        main = main_process(daemon)
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


def grown(values: Sequence[float]) -> float:
    """Return by how much the median of the last third is above that of the first."""
    third = max(1, len(values) // 3)
    return statistics.median(values[-third:]) - statistics.median(values[:third])


@scenario(
    "unloads", "P21",
    count("left", "50 × load, answer, unload: processes left after an unload"),
    count("reserved", "the same: bytes still reserved, all times together"),
    Figure("supervisor", "the same: supervisor RSS more, last third to first", "MB", at_most(5.0)),
    Figure("grown", "the same: a worker's RSS more, last third to first (without: its RSS)", "MB",
           at_most(5.0), "worker"),
    where=CPU, rounds=1,
)  # fmt: skip
def unloads(place: Place) -> Values:
    """Look at everything from outside after each unload; the first three only warm up."""
    supervisor_mb, worker_mb = [], []
    left = reserved = 0
    with Daemon({"m": real_entry(place) | {"preload": False}}) as daemon, daemon.client() as client:
        main = main_process(daemon)
        for number in range(3 + place.size(50, small=4)):
            client.load("m")
            client.complete("m", prompt="x", max_tokens=4)
            worker = psutil.Process(row(client, "m")["pid"])
            now_mb = worker.memory_info().rss / 1e6
            client.unload("m")
            left += is_alive(worker) + len(main.children(recursive=True))
            reserved += client.status()["memory"]["reserved_bytes"]
            if number >= 3:
                worker_mb.append(now_mb)
                supervisor_mb.append(main.memory_info().rss / 1e6)
    return {"left": left, "reserved": reserved, "worker": statistics.median(worker_mb),
            "supervisor": grown(supervisor_mb), "grown": grown(worker_mb)}  # fmt: skip


# ---------------------------------------------------------------- P15, P29: clients and files

STREAMS = 8


@scenario(
    "unread", "P15",
    Figure("silent_gap", "8 streams of 2 MB/s that are not read (without: that are read): each ends"
           " as `slow_consumer`; largest gap of another client's stream", "ms",
           without="reading_gap"),
    Figure("silent_rss", "the same: by how much the supervisor's RSS grows at most", "MB",
           at_most(64.0), "reading_rss"),
)  # fmt: skip
def unread_streams(place: Place) -> Values:
    values: dict[str, float | list[float]] = {}
    entry = fake(fake={"step_s": 0.01}, max_concurrency=STREAMS + 1)
    for what in ("reading", "silent"):
        with (
            serving({"m": entry}) as (daemon, client),
            peak_rss(main_process(daemon)) as rss_mb,
            Crowd(what, daemon.endpoint, "m", BIG, STREAMS) as crowd,
        ):
            other = TimedReader(client, "m", "other", max_tokens=300)
            must_be_whole(other, undisturbed("other", 300))
            if what == "silent":
                eventually(lambda c=client: not row(c, "m")["running"], timeout_s=60.0)  # type: ignore[misc]
                codes = crowd.result()["codes"]
                assert codes == {"slow_consumer": STREAMS}, codes
            values |= {f"{what}_gap": other.largest_gap_ms, f"{what}_rss": rss_mb[-1]}
            assert row(client, "m")["generation"] == 1
    return values


@scenario(
    "bodies", "P29",
    Figure("gap", "largest gap of a stream over HTTP, of steps of 5 ms, while 20 hostile bodies of"
           " up to 16 MB arrive, four at a time", "ms", at_most_beside("without", 50.0), "without"),
    Figure("cpu", "the same: CPU of the gateway's process for each body, in the mean", "ms"),
)  # fmt: skip
def large_bodies(place: Place) -> Values:
    """Read a stream over HTTP while hostile bodies come, and for as long without them."""
    wide = {"context_length": 3_900_000, "prefill_tokens_per_step": 1_000_000}
    bodies = hostile_bodies()[: place.size(20, small=4)]
    models = {"m": fake(fake={"step_s": 0.005, **wide}), "other": fake(fake=wide)}
    with HttpDaemon(models) as daemon, daemon.client() as client:
        gateway = psutil.Process(gateway_of(client)["pid"])

        def mark() -> tuple[float, float]:
            times = gateway.cpu_times()
            return time.monotonic(), float(times.user + times.system)

        reader = SseReader(daemon, chat("beside them", max_tokens=2_000_000)).started()
        began, cpu0 = mark()
        answers = send_all(daemon, bodies)
        over, cpu1 = mark()
        time.sleep(over - began)  # the measurement without the bodies
        end, cpu2 = mark()
        assert reader.is_alive(), "the stream has ended"
    said = [(body.what, answer[0]) for body, answer in zip(bodies, answers, strict=True)]
    odd = [one for one in said if one[1] not in (200, 400, 413)]
    assert not odd, f"neither read nor refused: {odd}"
    own_s = (cpu1 - cpu0) - (cpu2 - cpu1)
    return {"gap": largest_gap_ms(reader.times, began, over),
            "without": largest_gap_ms(reader.times, over, end),
            "cpu": 1000 * max(0.0, own_s) / len(bodies)}  # fmt: skip


@scenario(
    "reload", "P29",
    Figure("gap", "largest gap of a stream during a reload with 100 new models, of which one has a"
           " pipe for its config.json", "ms", without="without"),
    Figure("more", "the same: more than without a reload", "ms", median_at_most(50.0)),
)  # fmt: skip
def reloads(place: Place) -> Values:
    """Read two streams in a row: beside nothing, and beside a reload with many models.

    The first of them has a pipe for its config.json, which stands for a disk that does not answer.
    """
    names, entry = [f"n{n}" for n in range(place.size(100, small=10))], fake(fake={"step_s": 0.01})
    with serving({"m": entry}) as (daemon, client):
        first, *others = (daemon.folder / name for name in names)
        write_folder(first, llama_config(), llama_arrays())
        for folder in others:
            shutil.copytree(first, folder)
        (first / "config.json").unlink()
        os.mkfifo(first / "config.json")
        client.complete("m", prompt="warm", max_tokens=10)
        gaps: list[float] = []
        for is_reloaded in (False, True):
            stream = TimedReader(client, "m", "beside", max_tokens=300).started()
            if is_reloaded:
                added: dict[str, dict[str, Any]] = {
                    name: {"path": str(daemon.folder / name), "preload": False} for name in names
                }
                daemon.write_config({"m": entry, **added})
                with daemon.client() as other:
                    assert len(other.reload()["added"]) == len(names)
            must_be_whole(stream, undisturbed("beside", 300))
            gaps.append(stream.largest_gap_ms)
    return {"without": gaps[0], "gap": gaps[1], "more": gaps[1] - gaps[0]}
