"""What a worker says its process takes besides the arrays."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from mlxsup.worker.engine import EngineBytes
from mlxsup.worker.own_memory import own_bytes

HELD = EngineBytes(active=600, cache=100, peak=9000)


def play(monkeypatch: pytest.MonkeyPatch, rss: int) -> None:
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=rss))
    monkeypatch.setattr(psutil, "Process", lambda: process)


def test_on_a_cpu_it_is_what_is_resident_without_the_arrays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, 1000)
    assert own_bytes("cpu", HELD) == 300


def test_arrays_that_are_not_resident_make_it_no_less_than_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, 100)
    assert own_bytes("cpu", HELD) == 0


@pytest.mark.parametrize("backend", ["cuda", "metal", "fake"])
def test_elsewhere_it_cannot_tell(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    play(monkeypatch, 1000)
    assert own_bytes(backend, HELD) is None
