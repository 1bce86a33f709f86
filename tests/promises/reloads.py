"""P29: a reload with many models, one of which never answers: nobody else's stream waits for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from .bounds import median_at_most
from .daemons import Daemon, ready
from .measure import FAKE, Figure, Measure, Place, Values
from .watching import TimedReader
from support.daemon import fake
from support.safetensors_files import llama_arrays, llama_config, write_folder

MODELS = 100
STEP_S = 0.01
TOKENS = 300
"""Of a stream: half of it comes before the reload, at most."""


def reloads(place: Place) -> Values:
    """The largest gaps of two streams in a row: beside nothing, and beside a reload.

    The pipe stands for a file on a disk that does not answer.
    """
    with Daemon({"m": fake(fake={"step_s": STEP_S})}) as daemon, daemon.client() as client:
        ready(client, "m")
        names = write_models(daemon.folder)
        client.complete("m", prompt="warm", max_tokens=10)
        gaps: list[float] = []
        for is_reloaded in (False, True):
            stream = TimedReader(client, "m", "beside", max_tokens=TOKENS).started()
            if is_reloaded:
                models: dict[str, dict[str, Any]] = {"m": fake(fake={"step_s": STEP_S})}
                models |= {n: {"path": str(daemon.folder / n), "preload": False} for n in names}
                daemon.write_config(models)
                with daemon.client() as other:
                    assert len(other.reload()["added"]) == MODELS
            stream.finished(120.0)
            gaps.append(stream.largest_gap_ms)
    without, gap = gaps
    return {"without": without, "gap": gap, "more": gap - without}


def write_models(folder: Path) -> list[str]:
    """Folders of tiny models; in the first, config.json is a pipe without a writer."""
    names = [f"n{number}" for number in range(MODELS)]
    write_folder(folder / names[0], llama_config(), llama_arrays())
    for name in names[1:]:
        shutil.copytree(folder / names[0], folder / name)
    pipe = folder / names[0] / "config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    return names


MEASURES = (
    Measure(
        promise="P29",
        name="reload",
        where=FAKE,
        round=reloads,
        figures=(
            Figure(
                key="gap",
                what=f"largest gap of a stream during a reload with {MODELS} new models, of which"
                " one has a pipe for its config.json",
                unit="ms",
                digits=1,
                without="without",
            ),
            Figure(
                key="more",
                what="the same: more than without a reload",
                unit="ms",
                digits=1,
                bound=median_at_most(50.0),
            ),
        ),
    ),
)
