"""P7 and P32: honest work that only looks stuck."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil

from mlxsup.client import Client, ConnectionLost

from .bounds import equals
from .daemons import Daemon, ready
from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .watching import TimedReader
from support.daemon import fake, is_alive, row
from support.tiny_model import make_tiny_model

BURN = "while True: pass"
SLOW_STEP_S = 2.5
"""Of the fake engine that reads the long prompt: each step takes longer than `STEP_LIMIT_S`, as its
prediction says, so that a supervisor that does not listen to predictions kills it."""
STEP_LIMIT_S = 1.0
SLOW_CHUNK = 2500


def workers_of(client: Client, models: Iterable[str]) -> list[psutil.Process]:
    """Their processes, which the kernel knows by more than their ids."""
    return [psutil.Process(row(client, name)["pid"]) for name in models]


def ended(workers: Sequence[psutil.Process]) -> int:
    """How many of those processes live no more."""
    return sum(not is_alive(worker) for worker in workers)


def false_kills_under_load(place: Place) -> Values:
    """Twice as many burning processes as there are cores, and small limits."""
    models = {name: fake(fake={"step_s": 0.01}, step_timeout_s=1.0) for name in ("a", "b")}
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", BURN]))
            stack.callback(burner.kill)
        daemon = stack.enter_context(Daemon(models))
        client = stack.enter_context(daemon.client())
        for name in models:
            ready(client, name)
        workers = workers_of(client, models)
        readers = [
            TimedReader(client, name, f"{n}", max_tokens=500) for name in models for n in range(4)
        ]
        for reader in readers:
            assert len(reader.finished(300.0).token_ids) == 500
        return {"kills": ended(workers)}


def false_kills_after_pause(place: Place) -> Values:
    """The whole tree is stopped, and continues."""
    with (
        Daemon({"m": fake(fake={"step_s": 0.02}, step_timeout_s=1.0)}) as daemon,
        daemon.client() as client,
    ):
        ready(client, "m")
        workers = workers_of(client, ["m"])
        stream = TimedReader(client, "m", "paused", max_tokens=300).started()
        # This process is the client, and is not stopped: so the supervisor is missed.
        tree = daemon.processes()
        for process in tree:
            process.suspend()
        time.sleep(place.sizes.pause_s)  # the pause itself, not a wait for anything
        for process in tree:
            process.resume()
        stream.join(60.0)
        with daemon.client() as again:
            again.complete("m", prompt="serves", max_tokens=100)
        return {"kills": ended(workers)}


def lost_on_a_busy_machine(place: Place) -> Values:
    """Thirty burning processes, next to which the daemon and its workers are the least important:
    they get a few hundredths of the machine."""
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon({"m": fake(fake={"step_s": 0.01})}))
        client = stack.enter_context(daemon.client())
        ready(client, "m")
        workers = workers_of(client, ["m"])
        for process in daemon.processes():
            process.nice(15)
        for _ in range(30):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-c", BURN]))
            stack.callback(burner.kill)
        readers = [TimedReader(client, "m", f"{n}", max_tokens=50).started() for n in range(8)]
        for reader in readers:
            reader.join(600.0)
        lost = sum(isinstance(reader.error, ConnectionLost) for reader in readers)
        return {"lost": lost, "kills": ended(workers)}


def long_context(tokens: int) -> dict[str, int]:
    """What config.json says of a model that takes so long a prompt."""
    return {"max_position_embeddings": 2 * tokens}


def false_kills_in_prefill(place: Place, *, where: str) -> Values:
    """A prompt that takes far longer than the limit of a step."""
    tokens = place.sizes.long_prompt
    with ExitStack() as stack:
        if where == FAKE:
            slow = {
                "step_s": SLOW_STEP_S,
                "prefill_tokens_per_step": SLOW_CHUNK,
                "context_length": 2 * tokens,
            }
            entry = fake(fake=slow, step_timeout_s=STEP_LIMIT_S)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            entry = {"path": str(make_tiny_model(folder, config=long_context(tokens)))}
        daemon = stack.enter_context(Daemon({"m": entry}))
        client = stack.enter_context(daemon.client())
        ready(client, "m")
        workers = workers_of(client, ["m"])
        start_s = time.monotonic()
        result = client.complete("m", prompt_tokens=[65 + n % 20 for n in range(tokens)],
                                 max_tokens=2)  # fmt: skip
        assert result.usage.prompt_tokens == tokens
        return {"kills": ended(workers), "took": time.monotonic() - start_s}


def kills(what: str) -> Figure:
    """How often a worker was replaced that had done nothing wrong."""
    return Figure(key="kills", what=f"false kills: {what}", unit="", digits=0, bound=equals(0))


TOOK = Figure(key="took", what="how long that prompt took", digits=0)

MEASURES = (
    Measure(
        promise="P7",
        name="load",
        where=FAKE,
        round=false_kills_under_load,
        figures=(kills("8 streams under 2× CPU load, step limit 1 s"),),
    ),
    Measure(
        promise="P32",
        name="busy",
        where=FAKE,
        round=lost_on_a_busy_machine,
        figures=(
            Figure(
                key="lost",
                what="30 burning processes, the daemon at nice 15: of 8 streams, those that call it"
                " lost",
                unit="",
                digits=0,
                bound=equals(0),
            ),
            kills("the same"),
        ),
    ),
    Measure(
        promise="P7",
        name="pause",
        where=FAKE,
        round=false_kills_after_pause,
        most_repeats=1,
        figures=(kills("SIGSTOP of the whole tree for 60 s, then SIGCONT; step limit 1 s"),),
    ),
    Measure(
        promise="P7",
        name="prompt",
        where=FAKE,
        round=partial(false_kills_in_prefill, where=FAKE),
        most_repeats=1,
        figures=(
            kills("a prompt of 40,000 tokens, each step takes 2.5 s, as predicted; step limit 1 s"),
            TOOK,
        ),
    ),
    Measure(
        promise="P7",
        name="prompt-mlx",
        where=CPU,
        round=partial(false_kills_in_prefill, where=CPU),
        most_repeats=1,
        figures=(kills("a prompt of 40,000 tokens, step limit 30 s"), TOOK),
    ),
)
