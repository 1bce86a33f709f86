"""Ctrl-C while a process is being started: it waits for the start, and then it counts."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from mlxsup.cli.held_interrupt import held_interrupt


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_block_and_counts_once() -> None:
    done: list[str] = []

    def starts() -> None:
        with held_interrupt():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("started")

    with pytest.raises(KeyboardInterrupt):
        starts()
    assert done == ["started"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_no_interrupt_changes_nothing_and_an_ignored_one_stays_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with held_interrupt():
        pass
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupt():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
