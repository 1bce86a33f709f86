"""Batch answers that give their rows to interactive requests, on real daemons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, Result
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.daemon import Daemon, fake, row
from support.eventually import eventually
from support.streams import Reader
from support.tiny_model import make_tiny_model

SLOW = fake(max_concurrency=2, fake={"step_s": 0.01})
ENDLESS = 4000
ROWS = 8
BATCH_TOKENS = 500


def test_a_batch_answer_gives_its_row_and_continues_where_it_stood_C12() -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    with Daemon({"m": SLOW}, {"min_run_s": 0.05}) as daemon, daemon.client() as client:
        changes = client.events()
        first = Reader(client, "m", "first", max_tokens=ENDLESS, priority="batch").started()
        second = Reader(
            client, "m", "second", max_tokens=ENDLESS, priority="batch",
            on_notice=lambda notice: told.append((str(notice.kind), notice.detail)),
        ).started()  # fmt: skip
        eventually(lambda: len(second.tokens) > 20)  # past `min_run_s`, too
        own = Reader(client, "m", "own", max_tokens=ENDLESS, priority="interactive").started()
        id = str(second.stream.request_id)
        found = row(client, "m")
        assert (found["yielded"], found["line"][0]["paused"]) == ([id], "class")
        assert "1 gave way" in daemon.run("status").stdout
        own.stream.cancel()
        sent = len(second.tokens)
        eventually(lambda: len(second.tokens) > sent)
        assert row(client, "m")["yielded"] == []
        for stream, prompt in ((first, "first"), (second, "second")):
            stream.stream.cancel()
            ids = stream.finished().token_ids
            assert ids == answer_tokens(encode_text(prompt), len(ids))
        assert (first.stream.result.paused, second.stream.result.paused) == (0, 1)
        note = next(str(change["note"]) for change in changes if "pause" in str(change["note"]))
        assert note == f"request {id} is paused: an interactive request needs its row"
    assert dict(told)["paused"]["reason"] == "class"
    assert dict(told)["resumed"] == {"times": 1, "after": "pause"}


def test_the_status_says_who_waits_and_how_models_have_shared() -> None:
    with Daemon({"a": SLOW, "b": SLOW}) as daemon, daemon.client() as client:
        client.complete("a", prompt="x", max_tokens=30)
        client.complete("b", prompt="x", max_tokens=10)
        rows = {model["name"]: model for model in client.status()["models"]}
        assert rows["a"]["share"] + rows["b"]["share"] == pytest.approx(1.0)
        assert rows["a"]["share"] == pytest.approx(30 / 40)
        streams = [Reader(client, "a", "x", max_tokens=ENDLESS) for _ in range(3)]
        eventually(lambda: row(client, "a")["queued"] == 1)
        shown = daemon.run("status").stdout
        assert "engine time: a " in shown
        assert "waiting: process " in shown
        assert " 1 (2 running)" in shown
        for stream in streams:
            stream.stream.cancel()
        with daemon.client() as other:
            other.complete("b", prompt="x", max_tokens=1)
        assert json.loads(daemon.run("status", "--json").stdout)["models"][0]["share"] > 0.5


@pytest.mark.mlx
@pytest.mark.bits
@pytest.mark.timeout(1800)
def test_eight_streams_of_a_real_model_stay_the_same_bit_for_bit_C12(tmp_path: Path) -> None:
    """Eight batch rows, sampled; interactive requests come one after the other."""
    models = {"m": {"path": str(make_tiny_model(tmp_path / "m")), "max_concurrency": ROWS}}
    with Daemon(models, {"min_run_s": 0.02}) as daemon, daemon.client() as client:
        client.load("m")
        truth = [stream.finished(600) for stream in _batch(client)]
        assert [result.paused for result in truth] == [0] * ROWS
        streams = _batch(client)
        for stream in streams:
            stream.started()
        first_tokens = []
        while not any(_is_over(stream) for stream in streams):
            own = client.generate("m", prompt="now", max_tokens=3, priority="interactive")
            first_tokens.append(len([delta for delta in own if delta.token_ids]))
        results = [stream.finished(600) for stream in streams]
    assert all(first_tokens), "each had an answer while the others ran"
    # The last one may have found the row of a stream that was just over.
    assert sum(result.paused for result in results) >= len(first_tokens) - 1 > 1
    assert [_answer(result) for result in results] == [_answer(result) for result in truth]


def _batch(client: Client) -> list[Reader]:
    return [
        Reader(
            client, "m", f"tell me about number {n}", max_tokens=BATCH_TOKENS, ignore_eos=True,
            temperature=0.9, seed=n, logprobs=True, priority="batch",
        )
        for n in range(ROWS)
    ]  # fmt: skip


def _is_over(stream: Reader) -> bool:
    return not stream.is_alive()


def _answer(result: Result) -> tuple[object, ...]:
    assert result.logprobs
    return result.token_ids, result.text, result.logprobs
