"""What the rows of a GPU ask for: no process, no clock, no GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Self, cast

import pytest

from bench.fast_path.bursts import CountedBurst
from bench.fast_path.stages import Setting
from bench.gpu import loads, together
from bench.gpu.leases import founds as leases_founds
from bench.leases import Round


class Played:
    """A daemon and its client, which note the folders for kernels.

    Attributes:
        folders: of each daemon that was started, and whether it was empty then.
    """

    folders: list[tuple[Path, bool]]
    endpoint = "nowhere"

    def __init__(self, _: Any) -> None:
        pass

    def start(self, *, environment: dict[str, str]) -> None:
        folder = Path(environment[loads.CACHE])
        self.folders.append((folder, not list(folder.iterdir())))
        (folder / "a_kernel.ptx").touch()

    def __exit__(self, *_: object) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def load(self, name: str) -> None:
        pass


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> type[Played]:
    monkeypatch.setenv(loads.CACHE, "/shared/by/all/rows")
    monkeypatch.setattr(Played, "folders", [], raising=False)
    monkeypatch.setattr(loads, "Daemon", Played)
    monkeypatch.setattr(loads, "AsyncClient", Played)
    monkeypatch.setattr(loads, "model", lambda setting, name: Path(name))
    return Played


@pytest.mark.parametrize("stage", loads.STAGES, ids=lambda stage: stage.name)
def test_what_a_load_finds_compiled_is_its_own(
    stage: Any, played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def three(*_: object) -> list[CountedBurst]:
        return [CountedBurst(sent_s=[0.0], times=[[1.0]])] * 3

    async def wait_s(*_: object) -> float:
        return 1.0

    monkeypatch.setattr(loads, "three_bursts", three)
    monkeypatch.setattr(loads, "longest_wait_s", wait_s)

    async def measured() -> list[str]:
        setting = Setting(models=Path(), is_small=True)
        return [row async for row, _ in stage.measure(setting, stage.rows)]

    assert asyncio.run(measured()) == list(stage.rows)
    assert len({folder for folder, _ in played.folders}) == len(stage.rows)
    assert all(was_empty for _, was_empty in played.folders)
    assert not any(folder.exists() for folder, _ in played.folders)


def test_the_first_bursts_tell_how_they_were_gathered(
    played: type[Played], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def three(*_: object) -> list[CountedBurst]:
        return [CountedBurst(sent_s=[0.0], times=[[1.0, 2.0]], steps=steps) for steps in (7, 4, 4)]

    monkeypatch.setattr(loads, "three_bursts", three)

    async def notes() -> list[str]:
        setting = Setting(models=Path(), is_small=True)
        rows = [row async for row in loads.first_bursts(setting, ["first_burst_7b"])]
        return [found.note for _, founds in rows for found in founds.values()]

    [note] = asyncio.run(notes())
    assert note.startswith("Steps besides one for each token of an answer: 5 ")


class Answering:
    """A client that notes how long the answers should be that are asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    async def complete(self, name: str, *, prompt_tokens: list[int], max_tokens: int) -> None:
        self.asked.append((name, max_tokens))


def test_both_at_once_are_held_against_answers_that_take_equally_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = Answering()
    took_s = iter([9.0, 9.0, 9.0, 1.0, 1.25, 1.5])

    async def timed(work: Awaitable[object]) -> float:
        await work
        return next(took_s)

    monkeypatch.setattr(together, "timed", timed)
    found = asyncio.run(together.gain(cast(Any, client), 1))
    assert found.values == [1.5]
    assert found.sides == {"7b alone": [1.0], "03b alone": [1.25], "at once": [1.5]}
    assert set(client.asked) == {("a", 160), ("03b", 416)}
    assert len(client.asked) == 2 * 4


def test_rounds_in_turns_are_held_against_those_at_once_that_they_took_turns_with() -> None:
    def round_of(gap_ms: float, per_s: float, later_s: float) -> Round:
        return Round(first_s=(0.1, later_s), gaps_ms=[1.0, gap_ms, 2.0], decoded_per_s=per_s,
                     read_per_s=1.0)  # fmt: skip

    turns = [round_of(100, 300, 4), round_of(50, 100, 3)]
    found = leases_founds({"in turns": turns, "at once": [round_of(200, 100, 2)] * 2}, "a note")
    assert {name: list(one.values) for name, one in found.items()} == {
        "leases_gap": [0.5, 0.25], "leases_answers": [3.0, 1.0], "leases_first": [2.0, 1.5],
    }  # fmt: skip
    assert found["leases_gap"].sides == {"in turns": [100, 50], "at once": [200, 200]}
    assert [one.unit for one in found.values()] == ["ms", "tok/s", "s"]
    assert found["leases_gap"].note == "a note"
