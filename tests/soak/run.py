"""One soak: use, samples, and what they are held to (J4)."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlxsup.client import Client

from .curves import table, write_pictures
from .samples import MAX_GROWTH_MB, Curve, Sample, curves_of, values_now
from .use import CRASHES_EVERY, UNLOADS_EVERY, Use, entries
from support.daemon import Daemon, row, wait_for_state
from support.outside import FROM_OUTSIDE, must_have_whole_logs, why_it_ended
from support.scripted_daemon import ScriptedDaemon
from support.tiny_model import make_tiny_model
from support.verdict import NotShown

PATIENCE_S = 60.0
MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """What came of it.

    Attributes:
        samples: all of them.
        curves: each series after the warm-up.
        problems: what was wrong, one sentence each.
        turns: bursts of requests.
        where: for the report (J5).
    """

    samples: list[Sample]
    curves: list[Curve]
    problems: list[str]
    turns: int
    where: str

    def text(self) -> str:
        """For people."""
        last = self.samples[-1]
        growth = ", ".join(
            f"{one.name.partition(' of ')[2]} {one.growth:+.1f} MB"
            for one in self.curves
            if one.name.startswith("RSS")
        )
        return (
            f"soak ({self.where}): {last.at_s / 60:.1f} min, {last.requests} requests, every answer"
            f" compared, {self.turns // CRASHES_EVERY} crashes, {self.turns // UNLOADS_EVERY}"
            f" unloads, {len(self.samples)} samples of {len(self.curves)} series,"
            f" {len(self.problems)} problems; fitted growth of the RSS after the warm-up: {growth}"
        )


def soak(
    minutes: float,
    seed: int,
    *,
    out: Path,
    every_s: float = 5.0,
    is_real: bool = True,
    growth_mb: Mapping[str, float] = MAX_GROWTH_MB,
    sabotage: str = "",
    patience_s: float = PATIENCE_S,
    tell: Callable[[str], object] = lambda line: None,
) -> Soak:
    """Runs it; the samples, the table and the pictures are in `out`.

    Args:
        every_s: from one sample to the next, at least.
        is_real: whether one of the models is real MLX.
        growth_mb: by how much the RSS of the supervisor and of each worker may grow.
        sabotage: Python that the supervisor runs first: the leak that a test plants.
        patience_s: for requests to be over that nobody has open.

    Raises:
        AssertionError: the daemon broke, or its log says what it must not.
        NotShown: the daemon or a worker died of what comes from outside, or a disk was full.
    """
    with tempfile.TemporaryDirectory() as folder:
        tiny = make_tiny_model(Path(folder) / "tiny") if is_real else None
        with ScriptedDaemon(entries(tiny)).scripted(sabotage) as daemon, daemon.client() as client:
            for name in entries(tiny):
                wait_for_state(client, name, "READY")
            use = Use(client, tiny, seed)
            recorder = Recorder(daemon, client, use, out, patience_s)
            try:
                _use_until(60.0 * minutes, every_s, use, recorder, tell)
                _must_have_lived(client, [name for name in entries(tiny) if name != "mortal"])
            except ConnectionError as error:
                raise why_it_ended(daemon) from error
            must_have_whole_logs(daemon)
    curves = curves_of(recorder.samples, growth_mb)
    problems = use.problems + [one.problem for one in curves if one.problem]
    result = Soak(
        samples=recorder.samples,
        curves=curves,
        problems=problems[:MAX_PROBLEMS],
        turns=use.turn,
        where="fake engine, and MLX on the CPU" if is_real else "fake engine",
    )
    with written(out):
        pictures = [f"![{path.stem}]({path.name})" for path in write_pictures(result.samples, out)]
        text = [f"# Soak\n\n{result.text()}\n", table(curves), *pictures]
        (out / "soak.md").write_text("\n".join(text) + "\n")
    return result


@contextmanager
def written(where: Path) -> Iterator[None]:
    """A block that writes: if the disk refuses, the run has shown nothing."""
    try:
        where.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise NotShown(f"{where} cannot be written: {error.strerror}") from error


class Recorder:
    """Takes samples and appends each to `samples.jsonl` at once, so that a run that ends early has
    its curves too."""

    def __init__(
        self, daemon: Daemon, client: Client, use: Use, out: Path, patience_s: float
    ) -> None:
        self._daemon, self._client, self._use = daemon, client, use
        self._out, self._patience_s = out, patience_s
        self._start_s = time.monotonic()
        self.samples: list[Sample] = []
        with written(out):
            (out / "samples.jsonl").write_text("")

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start_s

    def take(self) -> Sample:
        """One more.

        Raises:
            NotShown: the disk is full.
        """
        values = values_now(self._daemon, self._client, self._patience_s)
        sample = Sample(at_s=self.elapsed_s, requests=self._use.requests, values=values)
        self.samples.append(sample)
        line = {"at_s": round(sample.at_s, 1), "requests": sample.requests, **values}
        with written(self._out), (self._out / "samples.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return sample


def _use_until(
    until_s: float,
    every_s: float,
    use: Use,
    recorder: Recorder,
    tell: Callable[[str], object],
) -> None:
    """At least until each fault has struck and there are samples to fit a line to."""
    due_s = 0.0
    while (
        recorder.elapsed_s < until_s or use.turn <= UNLOADS_EVERY or len(recorder.samples) < 8
    ) and len(use.problems) < MAX_PROBLEMS:
        use.take_turn()
        if recorder.elapsed_s >= due_s:
            due_s = recorder.elapsed_s + every_s
            sample = recorder.take()
            if len(recorder.samples) % 20 == 0:
                tell(f"{sample.at_s / 60:.1f} min, {sample.requests} requests")


def _must_have_lived(client: Client, names: list[str]) -> None:
    for name in names:
        seen = row(client, name)
        if seen["generation"] != 1:
            killed = seen["last_exit"]["signal"]
            if killed in {one.name for one in FROM_OUTSIDE}:
                raise NotShown(f"{killed} from outside ended the worker of {name}")
            raise AssertionError(f"{name} was replaced: {seen['last_exit']}")
