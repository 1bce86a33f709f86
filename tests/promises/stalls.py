"""P5, P6, P7: workers that live and do not go on, and honest work that only looks so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from support.daemon import Daemon, fake, row, wait_for_state
from support.tiny_model import make_tiny_model

from .crashes import SOON, Entry, real_entry
from .measure import CPU, FAKE, Figure, Measure, Place, Values, at_most, at_most_beside, equals
from .replacing import replaced_after
from .watching import Changes, TimedReader

LIMIT_S = 2.0
STALLS = ("sleep", "busy", "gil")
BURN = "while True: pass"


def stopped_worker(place: Place, *, entry: Entry) -> Values:
    """P5: SIGSTOP in the middle of an answer; and a cold load."""
    return replaced_after(entry(place), signal.SIGSTOP, tokens=500)


def stuck_step(place: Place) -> Values:
    """P6: from the last token before the stall until the supervisor acts."""
    found_s: dict[str, float] = {}
    entry = fake(fake={"step_s": 0.02}, step_timeout_s=LIMIT_S, restart=SOON)
    with Daemon({"m": entry}) as daemon, daemon.client() as client:
        changes = Changes(client)
        for how in STALLS:
            generation = wait_for_state(client, "m", "READY")["generation"]
            stuck = TimedReader(
                client, "m", f"[[fault stall={how} at=9]]", max_tokens=20, resume=False
            ).started()
            assert stuck.failed().code == "worker_crashed"
            found_s[how] = changes.left_ready_at("m", generation) - stuck.times[-1]
        assert "most recent call first" in daemon.log_text(), "no stacks in the worker's log"
    return found_s


# ---------------------------------------------------------------- P7


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
            wait_for_state(client, name, "READY")
        readers = [
            TimedReader(client, name, f"{n}", max_tokens=500) for name in models for n in range(4)
        ]
        for reader in readers:
            assert len(reader.finished(300.0).token_ids) == 500
        return {"kills": sum(row(client, name)["generation"] - 1 for name in models)}


def false_kills_after_pause(place: Place) -> Values:
    """The whole tree is stopped, and goes on."""
    with (
        Daemon({"m": fake(fake={"step_s": 0.02}, step_timeout_s=1.0)}) as daemon,
        daemon.client() as client,
    ):
        wait_for_state(client, "m", "READY")
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
            return {"kills": row(again, "m")["generation"] - 1}


def long_context(tokens: int) -> dict[str, int]:
    """What config.json says of a model that takes so long a prompt."""
    return {"max_position_embeddings": 2 * tokens}


def false_kills_in_prefill(place: Place, *, where: str) -> Values:
    """A prompt that takes far longer than the limit of a step."""
    tokens = place.sizes.long_prompt
    with ExitStack() as stack:
        if where == FAKE:
            slow = {"step_s": 0.25, "context_length": 2 * tokens}
            entry = fake(fake=slow, step_timeout_s=1.0)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            entry = {"path": str(make_tiny_model(folder, config=long_context(tokens)))}
        daemon = stack.enter_context(Daemon({"m": entry}))
        client = stack.enter_context(daemon.client())
        wait_for_state(client, "m", "READY")
        start_s = time.monotonic()
        result = client.complete("m", prompt_tokens=[65 + n % 20 for n in range(tokens)],
                                 max_tokens=2)  # fmt: skip
        assert result.usage.prompt_tokens == tokens
        return {
            "kills": row(client, "m")["generation"] - 1,
            "took": time.monotonic() - start_s,
        }


def _stopped(where: str, entry: Entry) -> Measure:
    return Measure(
        promise="P5",
        where=where,
        round=partial(stopped_worker, entry=entry),
        figures=(
            Figure(
                key="ready",
                what="SIGSTOP to READY in a new process (without: a cold load); its stream goes on",
                target="≤6 s + load",
                is_kept=at_most_beside("ready", "cold", 6.0),
                without="cold",
            ),
        ),
    )


def _kills(what: str) -> Figure:
    return Figure(key="kills", what=what, unit="", digits=0, target="0", is_kept=equals("kills", 0))


MEASURES = (
    _stopped(FAKE, lambda place: fake(fake={"step_s": 0.01}, restart=SOON)),
    _stopped(CPU, real_entry),
    Measure(
        promise="P6",
        where=FAKE,
        round=stuck_step,
        figures=tuple(
            Figure(
                key=how,
                what=f"a step that never ends ({name}), limit 2 s: until it is found",
                target="≤limit + 1 s",
                is_kept=at_most(how, LIMIT_S + 1.0),
            )
            for how, name in zip(STALLS, ("sleeps", "Python loop", "GIL held"), strict=True)
        ),
    ),
    Measure(
        promise="P7",
        where=FAKE,
        round=false_kills_under_load,
        figures=(_kills("false kills, 8 streams under 2× CPU load, step limit 1 s"),),
    ),
    Measure(
        promise="P7",
        where=FAKE,
        round=false_kills_after_pause,
        most_repeats=1,
        figures=(_kills("false kills, SIGSTOP of the whole tree for 60 s, then SIGCONT"),),
    ),
    *(
        Measure(
            promise="P7",
            where=where,
            round=partial(false_kills_in_prefill, where=where),
            most_repeats=1,
            figures=(
                _kills(f"false kills, a prompt of 40,000 tokens, step limit {limit}"),
                Figure(key="took", what="how long that prompt took", target="reported", digits=0),
            ),
        )
        for where, limit in ((FAKE, "1 s"), (CPU, "30 s"))
    ),
)
