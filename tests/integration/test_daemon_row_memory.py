"""Rows that do not fit into memory together: a real daemon, real processes, the fake engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mlxsup.client import Notice, RequestError, Result

from support.daemon import Daemon, fake, row

KIB = 1024
MIB = 1024 * KIB
LENGTH = 12

MODEL = fake(memory="300MiB", preload=True, max_concurrency=4, fake={"token_bytes": 128 * KIB})
"""A row takes a quarter of a MiB for each token, and 64 MiB to grow: two never fit."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"a": MODEL}) as daemon:
        yield daemon


def test_requests_that_do_not_fit_together_are_answered_one_after_the_other(
    daemon: Daemon,
) -> None:
    notices: dict[int, list[Notice]] = {number: [] for number in range(4)}
    results: dict[int, Result] = {}

    def ask(number: int) -> None:
        with daemon.client() as client:
            results[number] = client.complete(
                "a", prompt=f"[[fault slow=0.02]] {number}", max_tokens=LENGTH,
                on_notice=notices[number].append,
            )  # fmt: skip

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with daemon.client() as client:
        alone = [
            client.complete("a", prompt=f"[[fault slow=0.02]] {number}", max_tokens=LENGTH)
            for number in range(4)
        ]
        assert 0 < row(client, "a")["row_budget_bytes"] < 300 * MIB
    assert [results[n].token_ids for n in range(4)] == [one.token_ids for one in alone]
    waited = [one for each in notices.values() for one in each if one.kind == "queued"]
    assert "memory" in {one.detail["reason"] for one in waited}
    assert [one.paused for one in results.values()] == [0] * 4  # those that waited had no row yet
    assert [one.paused for one in alone] == [0] * 4


def test_a_request_that_cannot_fit_alone_ends_and_says_what_it_needs(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(RequestError) as caught:
            client.complete("a", prompt="x" * 2000, max_tokens=2)
        assert caught.value.code == "insufficient_memory"
        detail = caught.value.detail
        assert detail["needed_bytes"] > 500 * MIB > 300 * MIB > detail["available_bytes"]
        assert client.complete("a", prompt="short", max_tokens=2).finish_reason == "length"
