"""A request for vectors keeps the promises of answers: kills, cancels and clients that leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from mlxsup.client import Client, RequestError
from mlxsup.protocol.pooling import unpack_vector

from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT

COUNT = 600
TEXTS = [f"text {number} of many" for number in range(COUNT)]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    options = {"task": "embed", "prefill_tokens_per_step": 2**20, "step_s": 0.0005}
    ranks = {"task": "rerank"}
    with Daemon({"m": fake(fake=options, restart=PATIENT), "r": fake(fake=ranks)}) as daemon:
        with daemon.client() as client:
            wait_for_state(client, "m", "READY")
            wait_for_state(client, "r", "READY")
        yield daemon


def test_no_vector_is_missing_or_comes_twice_whenever_the_worker_dies(daemon: Daemon) -> None:
    with daemon.client() as client:
        whole = client.embed("m", TEXTS).vectors
        stream = client._send("m", {"texts": TEXTS})
        numbers, kills = [], iter((1, 200, 400))
        due: int | None = next(kills)
        for piece in stream:
            numbers += piece.token_ids
            if due is not None and len(numbers) >= due:
                os.kill(row(client, "m")["pid"], signal.SIGKILL)
                due = next(kills, None)
        got = stream.result
    assert sorted(numbers) == list(range(COUNT))
    assert got.resumed == 3
    for number, packed in zip(got.token_ids, got.vectors, strict=True):
        assert unpack_vector(packed) == whole[number]


def test_one_of_them_is_refused_and_the_model_serves_on(daemon: Daemon) -> None:
    with daemon.client() as client:
        with pytest.raises(RequestError, match="not text"):
            client.complete("m", prompt="hello")
        with pytest.raises(RequestError, match="texts\\[1\\] has 5000 tokens"):
            client.embed("m", ["a", "x" * 5000])
        assert len(client.embed("m", ["x" * 5000], truncate=True).vectors) == 1
        best = client.rerank("r", "q", ["a", "b", "c"], top_n=2)
        assert [one.score for one in best.results] == sorted(
            (one.score for one in best.results), reverse=True
        )
        assert len(best.results) == 2


def test_many_clients_get_their_own(daemon: Daemon) -> None:
    with daemon.client() as one, Client(one.endpoint) as other:
        streams = [
            client._send("m", {"texts": TEXTS[begin : begin + 200]})
            for begin, client in ((0, one), (200, other), (400, one))
        ]
        streams[2].cancel()
        for stream in streams:
            for _ in stream:
                pass
        first, second, third = (stream.result for stream in streams)
    assert third.finish_reason == "cancelled"
    assert len(first.vectors) == len(second.vectors) == 200
    assert not set(first.vectors) & set(second.vectors)
