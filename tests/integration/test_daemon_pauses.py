"""`mlxsup pause` and `resume` on real daemons: streams wait, and continue where they stood."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Client, RequestError, Result
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

SLOW = fake(max_concurrency=2, fake={"step_s": 0.01})
LENGTH = 400
"""Tokens of an answer that is read to its end."""

ENDLESS = 4000
"""Tokens of one that is cancelled, so that no pause can come too late."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": SLOW}) as daemon:
        yield daemon


def pause(client: Client, reader: Reader) -> str:
    """Pauses a stream that runs, and waits until its row has left."""
    id = str(reader.stream.request_id)
    assert client.pause(id)["stage"] in ("pausing", "paused")
    eventually(lambda: row(client, "m")["paused"] == [id])
    return id


def ended(stream: Reader, prompt: str = "hello") -> Result:
    """The result of an endless stream, which has gained tokens after now, each the right one."""
    sent = len(stream.tokens)
    eventually(lambda: len(stream.tokens) > sent + 5)
    stream.stream.cancel()
    result = stream.finished()
    assert result.token_ids == answer_tokens(encode_text(prompt), len(result.token_ids))
    return result


def test_a_stream_that_is_paused_and_resumed_has_every_token_once_C11(daemon: Daemon) -> None:
    with daemon.client() as client:
        told: list[tuple[str, dict[str, Any]]] = []
        stream = Reader(
            client, "m", "hello", max_tokens=ENDLESS,
            on_notice=lambda notice: told.append((str(notice.kind), notice.detail)),
        ).started()  # fmt: skip
        id = pause(client, stream)
        assert row(client, "m")["running"] == []
        eventually(lambda: row(client, "m")["kept_bytes"] > 0)
        other = client.complete("m", prompt="other", max_tokens=20)
        assert other.token_ids == answer_tokens(encode_text("other"), 20)
        assert client.resume(id)["stage"] == "queued"
        result = ended(stream)
        assert (result.paused, result.resumed) == (1, 0)
        assert result.timings.paused_s > 0.0
    kinds = [kind for kind, _ in told]
    assert kinds.index("paused") < kinds.index("resumed")
    assert dict(told)["paused"]["reason"] == "user"
    assert dict(told)["resumed"] == {"times": 1, "after": "pause"}


def test_the_commands_name_the_request_and_show_its_stage(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        id = str(stream.stream.request_id)
        done = daemon.run("pause", id)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"{id} of m: paus")
        eventually(lambda: row(client, "m")["paused"] == [id])
        again = daemon.run("pause", id, "--json")
        error = json.loads(again.stdout)["error"]
        assert (again.returncode, error["code"]) == (1, "invalid_request")
        assert "is paused already" in error["message"]
        assert "1 paused" in daemon.run("status").stdout
        done = daemon.run("resume", id, "--json")
        assert done.returncode == 0
        assert json.loads(done.stdout)["stage"] == "queued"
        ended(stream)
        done = daemon.run("resume", id)
        assert done.returncode == 1
        assert f"no open request has the id '{id}'" in done.stderr


def test_a_worker_that_dies_takes_the_state_and_not_the_answer(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        id = pause(client, stream)
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        assert row(client, "m")["paused"] == [id]
        client.resume(id)
        result = ended(stream)
        assert (result.paused, result.resumed) == (1, 0), "it did not run when the worker died"


def test_an_unload_lets_a_paused_stream_finish_first(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=LENGTH).started()
        pause(client, stream)
        client.unload("m")
        assert stream.finished().token_ids == answer_tokens(encode_text("hello"), LENGTH)
        assert row(client, "m")["state"] == "STOPPED"


def test_a_paused_stream_can_be_cancelled_and_leaves_nothing(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        pause(client, stream)
        stream.stream.cancel()
        assert stream.finished().finish_reason == "cancelled"
        eventually(lambda: row(client, "m")["kept_bytes"] == 0)
        assert row(client, "m")["paused"] == []


def test_what_may_not_be_paused_continues(daemon: Daemon) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS, resume=False).started()
        with pytest.raises(RequestError, match="may not be paused: it was sent with") as caught:
            client.pause(str(stream.stream.request_id))
        assert caught.value.code == "invalid_request"
        ended(stream)


@pytest.mark.mlx
@pytest.mark.bits
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba"])
def test_real_caches_of_each_kind_continue_as_if_nothing_had_happened(
    tmp_path: Path, name: str
) -> None:
    from support.model_types.build import make_model
    from support.model_types.listed import model_types

    (model_type,) = model_types([name])
    folder = make_model(tmp_path / name, model_type)
    prompt = [3 + 7 * n % 90 for n in range(40)]
    models = {"m": {"path": str(folder), "prefix_cache": 0}}
    with Daemon(models) as daemon, daemon.client() as client:
        more: dict[str, Any] = {"prompt_tokens": prompt, "max_tokens": 400, "ignore_eos": True}
        whole = client.complete("m", **more)
        stream = Reader(client, "m", **more).started()
        for _ in range(3):
            id = str(stream.stream.request_id)
            client.pause(id)
            eventually(lambda: row(client, "m")["running"] == [])
            if row(client, "m")["paused"] == []:
                break  # its end came first
            client.resume(id)
        result = stream.finished(600)
        assert result.token_ids == whole.token_ids
        assert result.paused > 0
