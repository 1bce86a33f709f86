"""P11: loads that cannot succeed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlxsup.client import RequestError

from .bounds import equals
from .daemons import Daemon
from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .watching import Changes, ExitWatch, TimedReader
from support.daemon import fake, row


def answer_after_exit(entry: dict[str, Any], named: str) -> tuple[int, float]:
    """How often a load was tried, and from the exit of its worker to the answer, in ms."""
    with Daemon({"m": {**entry, "preload": False}}) as daemon, daemon.client() as client:
        changes = Changes(client)
        waiting = TimedReader(client, "m", "waits", max_tokens=1)
        lived_at, change = changes.first(lambda c: bool(c.get("pid")))
        watch = ExitWatch(change["pid"], lived_at)
        error = waiting.failed()
        assert isinstance(error, RequestError)
        assert error.code == "load_failed", error
        assert named in error.message, error.message
        after = row(client, "m")
        assert after["state"] == "FAILED", after
        return after["generation"], 1000 * (waiting.ended_at - watch.ended_at())


def fake_load_errors(place: Place) -> Values:
    """P11: what the fake engine says on demand."""
    return values_of(
        answer_after_exit(fake(fake={"load_error": kind, "load_s": 0.3}), "")
        for kind in ("missing", "bad", "device")
    )


def values_of(tried: Iterable[tuple[int, float]]) -> Values:
    """Of all loads."""
    attempts, answers_ms = zip(*tried, strict=True)
    return {"attempts": list(attempts), "answer": list(answers_ms)}


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
        return values_of(
            [
                answer_after_exit({"path": f"{folder}/none"}, "none"),
                answer_after_exit({"path": str(broken)}, "config.json"),
                answer_after_exit({"path": str(short)}, "model.safetensors"),
            ]
        )


MEASURES = tuple(
    Measure(
        promise="P11",
        name=name,
        where=where,
        round=measure,
        figures=(
            Figure(
                key="attempts",
                what=f"{what}: attempts",
                unit="",
                digits=0,
                bound=equals(1),
            ),
            Figure(
                key="answer",
                what="the same: from the exit of the worker to the answer",
                unit="ms",
                digits=1,
            ),
        ),
    )
    for name, where, measure, what in (
        ("fake", FAKE, fake_load_errors, "model missing, bad, no device"),
        (
            "mlx",
            CPU,
            real_load_errors,
            "no folder, bad config.json, weights cut short (each named)",
        ),
    )
)
