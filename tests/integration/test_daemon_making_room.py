"""An interactive request that finds no memory for its row: real processes, the fake engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from mlxsup.client import Client, Notice, RequestError, Result

from support.daemon import Daemon, fake, row

OPTIONS = {"step_s": 0.05, "token_bytes": 300_000, "active_bytes": 1_000_000}
MODEL = fake(memory="400MiB", preload=True, max_concurrency=4, fake=OPTIONS)
"""Two short rows do not fit together."""

SETTINGS = {"min_run_s": 0.2}
LENGTH = 60


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"a": MODEL}, supervisor=SETTINGS) as daemon:
        yield daemon


class Answering:
    """A request that has begun to answer when this returns.

    Args:
        client: who asks.
        priority: its class.
        length: tokens of the answer.
    """

    def __init__(self, client: Client, priority: str, length: int = LENGTH) -> None:
        self._stream = client.generate("a", prompt="long", max_tokens=length, priority=priority)
        self.tokens: list[int] = []
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._has_begun.wait(60.0)

    def _read(self) -> None:
        for delta in self._stream:
            self.tokens += delta.token_ids
            if len(self.tokens) >= 10:
                self._has_begun.set()

    def cancel(self) -> Result:
        """Its client needs no more of it."""
        self._stream.cancel()
        return self.result()

    def result(self) -> Result:
        """Once it is complete."""
        self._thread.join()
        return self._stream.result


def test_a_batch_row_makes_room_and_its_answer_continues_token_for_token(daemon: Daemon) -> None:
    notices: list[Notice] = []
    with daemon.client() as client:
        alone = client.complete("a", prompt="long", max_tokens=LENGTH)
        batch = Answering(client, "batch")
        short = client.complete(
            "a", prompt="now", max_tokens=4, priority="interactive", queue_timeout_s=60.0,
            on_notice=notices.append,
        )  # fmt: skip
        assert len(batch.tokens) < LENGTH
        result = batch.result()
        assert (result.token_ids, batch.tokens) == (alone.token_ids, alone.token_ids)
        assert result.paused == 1
        assert (short.finish_reason, short.paused) == ("length", 0)
    assert {notice.kind for notice in notices} <= {"queued", "prefilling"}
    reasons = {one.detail["reason"] for one in notices if one.kind == "queued"}
    assert "memory" in reasons


def test_its_time_in_the_queue_is_limited_if_no_row_may_leave(daemon: Daemon) -> None:
    notices: list[Notice] = []
    with daemon.client() as client:
        other = Answering(client, "normal", 4 * LENGTH)
        with pytest.raises(RequestError) as caught:
            client.complete(
                "a", prompt="now", max_tokens=4, priority="interactive", queue_timeout_s=0.5,
                on_notice=notices.append,
            )  # fmt: skip
        assert caught.value.code == "queue_timeout"
        shown = row(client, "a")
        assert (len(shown["running"]), shown["yielded"], shown["queued"]) == (1, [], 0)
        assert other.cancel().paused == 0
    assert "paused" not in {notice.kind for notice in notices}
