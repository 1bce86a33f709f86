"""P11, P21: loads that cannot succeed, and models that come and go."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil
from mlxsup.client import RequestError
from support.daemon import Daemon, fake, row
from support.eventually import eventually

from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .watching import Changes, ExitWatch, TimedReader


def answer_after_exit(entry: dict[str, Any], named: str) -> float:
    """From the exit of a worker that cannot load to the answer, in ms."""
    with Daemon({"m": {**entry, "preload": False}}) as daemon, daemon.client() as client:
        changes = Changes(client)
        waiting = TimedReader(client, "m", "waits", max_tokens=1)
        _, change = changes.first(lambda c: bool(c.get("pid")))
        watch = ExitWatch(change["pid"])
        error = waiting.failed()
        assert isinstance(error, RequestError)
        assert error.code == "load_failed", error
        assert named in error.message, error.message
        after = row(client, "m")
        assert (after["state"], after["generation"]) == ("FAILED", 1), after
        return 1000 * (waiting.ended_at - watch.ended_at())


def fake_load_errors(place: Place) -> Values:
    """P11: what the fake engine says on demand."""
    return {
        "answer": [
            answer_after_exit(fake(fake={"load_error": kind, "load_s": 0.3}), "")
            for kind in ("missing", "bad", "device")
        ]
    }


def real_load_errors(place: Place) -> Values:
    """P11: no folder, a broken config.json, weights that are cut short."""
    with tempfile.TemporaryDirectory() as folder:
        broken = Path(folder) / "broken"
        shutil.copytree(place.tiny, broken)
        (broken / "config.json").write_text(json.dumps({"model_type": 7})[:-3])
        short = Path(folder) / "short"
        shutil.copytree(place.tiny, short)
        weights = short / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        return {
            "answer": [
                answer_after_exit({"path": f"{folder}/none"}, "none"),
                answer_after_exit({"path": str(broken)}, "config.json"),
                answer_after_exit({"path": str(short)}, "model.safetensors"),
            ]
        }


def unloads(place: Place) -> Values:
    """P21: loaded and unloaded again and again; the first time is not counted."""
    with (
        Daemon({"m": {"path": str(place.tiny), "preload": False}}) as daemon,
        daemon.client() as client,
    ):
        used_mb = []
        for _ in range(place.sizes.unloads + 1):
            client.load("m")
            client.complete("m", prompt="x", max_tokens=4)
            worker = psutil.Process(row(client, "m")["pid"])
            client.unload("m")
            assert not worker.is_running(), "the process is still there"
            assert client.status()["memory"]["reserved_bytes"] == 0
            used_mb.append(machine_used_mb())
        eventually(lambda: len(daemon.processes()) == 1)
    return {"before": used_mb[0], "after": used_mb[-1]}


def machine_used_mb() -> float:
    """What the machine has in use."""
    memory = psutil.virtual_memory()
    return float(memory.total - memory.available) / 1e6


MEASURES = (
    *(
        Measure(
            promise="P11",
            where=where,
            round=measure,
            figures=(
                Figure(
                    key="answer",
                    what=f"{what}: 1 attempt; from the exit to the answer",
                    unit="ms",
                    digits=1,
                    target="reported",
                ),
            ),
        )
        for where, measure, what in (
            (FAKE, fake_load_errors, "model missing, bad, no device"),
            (CPU, real_load_errors, "no folder, bad config.json, weights cut short (each named)"),
        )
    ),
    Measure(
        promise="P21",
        where=CPU,
        round=unloads,
        most_repeats=1,
        figures=(
            Figure(
                key="after",
                what="50 × load and unload: the machine's memory in use at the end"
                " (without: after the first); process gone, reserved 0 each time",
                unit="MB",
                digits=0,
                without="before",
                target="reported",
            ),
        ),
    ),
)
