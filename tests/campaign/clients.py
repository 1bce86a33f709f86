"""P15, P29: clients that do not read or send hostile bodies, and files that never come."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil

from .crowd import BIG, STREAMS
from .oracle import must_be_whole
from .scenario import (
    FAKE,
    Figure,
    Place,
    Scenario,
    Values,
    at_most,
    at_most_beside,
    median_at_most,  # fmt: skip
)
from .watch import (
    Crowd,
    GatewayDaemon,
    TimedReader,
    largest_gap_ms,
    peak_rss,
    serving,
)
from support.daemon.daemon import fake, row
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.gateway.http_daemon import SseReader, chat, gateway_of
from support.gateway.large_bodies import hostile_bodies, send_all
from support.models.safetensors_files import llama_arrays, llama_config, write_folder


def unread_streams(place: Place) -> Values:
    """P15: eight streams of 2 MB/s each that are read, and then ones that are not."""
    values: dict[str, float | list[float]] = {}
    entry = fake(fake={"step_s": 0.01}, max_concurrency=STREAMS + 1)
    for what in ("reading", "silent"):
        with (
            serving({"m": entry}) as (daemon, client),
            peak_rss(daemon.main) as grown,
            Crowd(what, daemon.endpoint, "m", BIG, STREAMS) as crowd,
        ):
            other = TimedReader(client, "m", "other", max_tokens=300)
            must_be_whole(other, undisturbed("other", 300))
            if what == "silent":
                eventually(lambda c=client: not row(c, "m")["running"], timeout_s=60.0)  # type: ignore[misc]
                codes = crowd.result()["codes"]
                assert codes == {"slow_consumer": STREAMS}, codes
            values |= {f"{what}_gap": other.largest_gap_ms, f"{what}_rss": grown[-1]}
            assert row(client, "m")["generation"] == 1
    return values


# ---------------------------------------------------------------- P29


def large_bodies(place: Place) -> Values:
    """P29: one stream over HTTP while hostile bodies come, and for as long without them."""
    wide = {"context_length": 3_900_000, "prefill_tokens_per_step": 1_000_000}
    bodies = hostile_bodies()[: place.size(20, small=4)]
    models = {"m": fake(fake={"step_s": 0.005, **wide}), "other": fake(fake=wide)}
    with GatewayDaemon(models) as daemon, daemon.client() as client:
        gateway = psutil.Process(gateway_of(client)["pid"])
        reader = SseReader(daemon, chat("beside them", max_tokens=2_000_000)).started()
        marks = [(time.monotonic(), cpu_s(gateway))]
        answers = send_all(daemon, bodies)
        marks.append((time.monotonic(), cpu_s(gateway)))
        time.sleep(marks[1][0] - marks[0][0])  # the measurement without the bodies
        marks.append((time.monotonic(), cpu_s(gateway)))
        assert reader.is_alive(), "the stream has ended"
    said = [(body.what, answer[0]) for body, answer in zip(bodies, answers, strict=True)]
    odd = [one for one in said if one[1] not in (200, 400, 413)]
    assert not odd, f"neither read nor refused: {odd}"
    (began, cpu0), (over, cpu1), (end, cpu2) = marks
    own_s = (cpu1 - cpu0) - (cpu2 - cpu1)
    return {"gap": largest_gap_ms(reader.times, began, over),
            "without": largest_gap_ms(reader.times, over, end),
            "cpu": 1000 * max(0.0, own_s) / len(bodies)}  # fmt: skip


def cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def reloads(place: Place) -> Values:
    """P29: two streams in a row: beside nothing, and beside a reload with many models.

    The first of them has a pipe for its config.json, which stands for a disk that does not answer.
    """
    wanted, entry = place.size(100, small=10), fake(fake={"step_s": 0.01})
    with serving({"m": entry}) as (daemon, client):
        names = model_folders(daemon.folder, wanted)
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
                    assert len(other.reload()["added"]) == wanted
            must_be_whole(stream, undisturbed("beside", 300))
            gaps.append(stream.largest_gap_ms)
    return {"without": gaps[0], "gap": gaps[1], "more": gaps[1] - gaps[0]}


def model_folders(folder: Path, wanted: int) -> list[str]:
    """Make folders of tiny models, the first of them with the pipe; return their names."""
    names = [f"n{number}" for number in range(wanted)]
    write_folder(folder / names[0], llama_config(), llama_arrays())
    for name in names[1:]:
        shutil.copytree(folder / names[0], folder / name)
    pipe = folder / names[0] / "config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    return names


SCENARIOS = (
    Scenario(name="unread", promises="P15", where=FAKE, rounds=5, run=unread_streams, figures=(
        Figure("silent_gap", "8 streams of 2 MB/s that are not read (without: that are read): each"
               " ends as `slow_consumer`; largest gap of another client's stream", "ms",
               without="reading_gap"),
        Figure("silent_rss", "the same: by how much the supervisor's RSS grows at most", "MB",
               at_most(64.0), "reading_rss"))),
    Scenario(name="bodies", promises="P29", where=FAKE, rounds=5, run=large_bodies, figures=(
        Figure("gap", "largest gap of a stream over HTTP, of steps of 5 ms, while 20 hostile bodies"
               " of up to 16 MB arrive, four at a time", "ms", at_most_beside("without", 50.0),
               "without"),
        Figure("cpu", "the same: CPU of the gateway's process for each body, in the mean", "ms"))),
    Scenario(name="reload", promises="P29", where=FAKE, rounds=5, run=reloads, figures=(
        Figure("gap", "largest gap of a stream during a reload with 100 new models, of which one"
               " has a pipe for its config.json", "ms", without="without"),
        Figure("more", "the same: more than without a reload", "ms", median_at_most(50.0)))),
)  # fmt: skip
