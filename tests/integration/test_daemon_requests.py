"""Requests on a real daemon: who is next, what an answer holds, what is shown and what it costs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Channel, Client, FinishReason, Notice, RequestError, Result

from support.cli.cli import command
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

ENDLESS = 4000
"""Tokens of an answer that is cancelled."""

MODELS = {
    "m": fake(max_concurrency=1, fake={"step_s": 0.01}),
    "held": fake(max_concurrency=1, fake={"step_s": 0.1}),
    "pair": fake(max_concurrency=2, fake={"step_s": 0.01}),
    "slow": fake(preload=False, fake={"load_s": 1.0, "prefill_tokens_per_step": 16}),
}
CLIENTS = """
[clients.nightly]
priority = "batch"
max_priority = "normal"
[clients.alice]
weight = 2
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """A daemon of which each client may have five requests waiting."""
    daemon = Daemon(MODELS, {"max_queue_per_client": 5})
    with daemon.config.open("a") as config:
        config.write(CLIENTS)
    with daemon:
        yield daemon


def listed(client: Client) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in client.requests()["requests"]}


def log_lines(daemon: Daemon) -> dict[str, str]:
    """The line about each request that has ended, by its id."""
    text = (daemon.logs / "mlxsup.log").read_text()
    found = re.findall(r"^\S+Z INFO request ended (id=(\S+) .*)$", text, re.M)
    assert len(found) == len({id for _, id in found}), "one line each"
    return {id: line for line, id in found}


def test_requests_are_seen_cancelled_by_another_and_logged_without_their_text(
    daemon: Daemon, client: Client
) -> None:
    with daemon.client() as other:
        runs = Reader(client, "m", "secret prompt", max_tokens=ENDLESS).started()
        waits = Reader(client, "m", "secret too", max_tokens=ENDLESS)
        run_id, wait_id = str(runs.stream.request_id), str(waits.stream.request_id)
        eventually(lambda: wait_id in listed(other))
        seen = listed(other)
        assert (seen[run_id]["state"], seen[wait_id]["state"]) == ("answering", "waiting")
        assert (seen[wait_id]["place"], seen[wait_id]["reason"]) == (1, "rows")
        assert other.cancel(wait_id)["tokens_sent"] == 0
        assert waits.finished().finish_reason == "cancelled"
        assert other.cancel(run_id)["request"] == run_id
        result = runs.finished()
        assert result.finish_reason == "cancelled"
        assert not {run_id, wait_id} & set(listed(other))
    eventually(lambda: {run_id, wait_id} <= set(log_lines(daemon)))
    line = log_lines(daemon)[run_id]
    assert " outcome=cancelled " in line
    assert f" completion_tokens={result.usage.completion_tokens} " in line
    assert re.search(r' client="process \d+@\d+"', line)
    assert "secret" not in daemon.log_text()


def test_a_second_terminal_joins_from_the_first_token_and_leaves_without_a_trace(
    daemon: Daemon, client: Client
) -> None:
    with daemon.client() as other:
        own = Reader(client, "m", "hello", max_tokens=300).started()
        id = str(own.stream.request_id)
        with other.attach(id) as left:
            next(left)
        joined = other.attach(id)
        text = "".join(delta.text for delta in joined)
        result = own.finished()
        assert (text, joined.result.token_ids) == (own.text, result.token_ids)
        assert joined.result.usage == result.usage
        assert result.token_ids == undisturbed("hello", 300)


def test_a_reload_changes_the_log_level(daemon: Daemon, client: Client) -> None:
    def logged() -> int:
        return daemon.log_text().count(" INFO request ended ")

    before = logged()
    client.complete("m", prompt="hi", max_tokens=3)
    eventually(lambda: logged() == before + 1)
    assert " DEBUG " not in daemon.log_text()
    client.configure({"supervisor.log_level": "debug"})
    with pytest.raises(RequestError):
        client.complete("unknown", prompt="hi")
    eventually(lambda: " DEBUG request ended id=" in daemon.log_text())
    client.configure({"supervisor.log_level": "warning"})
    client.complete("m", prompt="hi", max_tokens=3)
    assert logged() == before + 1
    client.configure({"supervisor.log_level": None})


# ---------------------------------------------------------------- the line


@pytest.fixture
def held(client: Client) -> Iterator[None]:
    """Has the only row of `held` taken by an answer without an end."""
    reader = Reader(client, "held", "held", max_tokens=ENDLESS).started()
    yield
    reader.stream.cancel()
    reader.finished()


def line(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = row(client, "held")["line"]
    return found


@pytest.mark.usefixtures("held")
def test_connections_of_this_process_are_one_account_and_a_listed_name_is_another(
    daemon: Daemon, client: Client
) -> None:
    with daemon.client() as two:
        readers = [
            Reader(one, "held", "x", max_tokens=1, client=f"invented {number}")
            for number, one in enumerate((client, two, client, two, client))
        ]
        eventually(lambda: row(client, "held")["queued"] == 5)
        with pytest.raises(RequestError) as caught:
            two.complete("held", prompt="x", max_tokens=1)
        assert caught.value.detail["limit"] == "max_queue_per_client"
        readers.append(Reader(two, "held", "x", max_tokens=1, client="alice"))
        eventually(lambda: row(client, "held")["queued"] == 6)
        waiting = client.status()["queue"]["per_client"]
        [process] = {name for name in waiting if name != "alice"}
        assert process.startswith(f"process {os.getpid()}@")
        assert waiting == {process: 5, "alice": 1}
        for reader in readers:
            reader.stream.cancel()
            reader.finished()


@pytest.mark.usefixtures("held")
def test_classes_come_in_order_and_may_be_changed_by_hand(daemon: Daemon, client: Client) -> None:
    asked = {
        name: Reader(client, "held", name, max_tokens=1, **more)
        for name, more in (
            ("nightly", {"client": "nightly"}),
            ("normal", {}),
            ("batch", {"priority": "batch"}),
            ("urgent", {"priority": "interactive"}),
        )
    }
    ids = {reader.stream.request_id: name for name, reader in asked.items()}
    eventually(lambda: row(client, "held")["queued"] == 4)
    assert [ids[one["id"]] for one in line(client)] == ["urgent", "normal", "nightly", "batch"]
    id = str(asked["batch"].stream.request_id)
    done = daemon.run("prioritize", id, "interactive")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{id} waits for held as interactive (was batch)\n"
    assert [ids[one["id"]] for one in line(client)] == ["batch", "urgent", "normal", "nightly"]
    number = next(one["number"] for one in line(client) if ids[one["id"]] == "nightly")
    assert client.prioritize(number, "interactive")["client"] == "nightly"
    assert "waiting: 3 interactive, 1 normal" in daemon.run("status").stdout
    for reader in asked.values():
        reader.stream.cancel()
        reader.finished()


@pytest.mark.usefixtures("held")
def test_commands_of_one_terminal_are_one_account_and_a_program_is_its_own(
    daemon: Daemon, client: Client
) -> None:
    generate = command("generate", "held", "x", "--endpoint", daemon.endpoint)
    lines = [f"{shlex.join(one)} &" for one in (generate, generate, [*generate, "--client=alice"])]
    # A session of its own: that of the tests may be led from outside their container.
    shell = ["sh", "-c", "\n".join([*lines, "wait"])]
    with subprocess.Popen(shell, start_new_session=True) as terminal:
        program = Reader(client, "held", "x", max_tokens=1)
        try:
            eventually(lambda: row(client, "held")["queued"] == 4, timeout_s=300.0)
            accounts = sorted(one["client"].partition(" ")[0] for one in line(client))
            assert accounts == ["alice", "process", "terminal", "terminal"]
            assert len({one["client"] for one in line(client)}) == 3
        finally:
            os.killpg(terminal.pid, signal.SIGTERM)
            program.stream.cancel()
            program.finished()


# ---------------------------------------------------------------- answers

CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


def test_reasoning_calls_logprobs_and_warnings_arrive(client: Client) -> None:
    said = f"<think>hm</think>Look <tool_call>{CALL}</tool_call> and <tool_call>oops"
    stream = client.generate(
        "pair",
        messages=[{"role": "user", "content": f"[[say {said}]]"}],
        tools=[{"type": "function", "function": {"name": "weather"}}],
        seed=4,
        logprobs=True,
        top_logprobs=2,
        top_k=5,
    )
    deltas = list(stream)
    result = stream.result
    assert (result.reasoning, result.text) == ("hm", "Look  and <tool_call>oops")
    (call,) = result.tool_calls
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert result.finish_reason is FinishReason.TOOL_CALLS
    assert len(result.warnings) == 1
    assert result.logprobs is not None
    assert [entry.chosen.token for entry in result.logprobs] == result.token_ids
    assert len(result.logprobs[0].top) == 2
    assert {delta.channel for delta in deltas} == set(Channel) - {Channel.PROMPT}
    assert result.usage.completion_tokens == len(result.token_ids)
    plain = client.complete("pair", prompt="x", max_tokens=3)
    assert (plain.logprobs, plain.warnings, plain.tool_calls) == (None, [], [])


def test_a_waiting_request_gets_notices_of_its_progress(client: Client) -> None:
    told: list[Notice] = []
    client.complete("slow", prompt="x" * 200, max_tokens=3, on_notice=told.append)
    kinds = [str(notice.kind) for notice in told]
    assert told[0].detail == {"position": 1, "reason": "load", "since_s": 0.0}
    assert list(dict.fromkeys(kinds)) == ["queued", "loading", "prefilling"]
    fractions = [n.detail["fraction"] for n in told if str(n.kind) == "loading"]
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 2
    done = [n.detail["done"] for n in told if str(n.kind) == "prefilling"]
    assert done == sorted(done)


# ---------------------------------------------------------------- pauses


def pause(client: Client, reader: Reader) -> str:
    """Pauses a stream that runs, and waits until its row has left."""
    id = str(reader.stream.request_id)
    assert client.pause(id)["stage"] in ("pausing", "paused")
    eventually(lambda: row(client, "pair")["paused"] == [id])
    return id


def ended(stream: Reader) -> Result:
    """The result of an endless stream, which has gained tokens after now, each the right one."""
    sent = len(stream.tokens)
    eventually(lambda: len(stream.tokens) > sent + 5)
    stream.stream.cancel()
    result = stream.finished()
    assert result.token_ids == undisturbed("hello", len(result.token_ids))
    return result


def test_a_stream_that_is_paused_and_resumed_has_every_token_once_C11(client: Client) -> None:
    told: list[Notice] = []
    stream = Reader(client, "pair", "hello", max_tokens=ENDLESS, on_notice=told.append).started()
    id = pause(client, stream)
    assert row(client, "pair")["running"] == []
    eventually(lambda: row(client, "pair")["kept_bytes"] > 0)
    other = client.complete("pair", prompt="other", max_tokens=20)
    assert other.token_ids == undisturbed("other", 20)
    assert client.resume(id)["stage"] == "queued"
    result = ended(stream)
    assert (result.paused, result.resumed) == (1, 0)
    assert result.timings.paused_s > 0.0
    kinds = [(str(one.kind), one.detail) for one in told if one.kind in ("paused", "resumed")]
    assert [kind for kind, _ in kinds] == ["paused", "resumed"]
    assert kinds[0][1]["reason"] == "user"
    assert kinds[1][1] == {"times": 1, "after": "pause"}


def test_a_paused_stream_outlives_its_worker_and_its_cancel_leaves_nothing(client: Client) -> None:
    stream = Reader(client, "pair", "hello", max_tokens=ENDLESS).started()
    id = pause(client, stream)
    before = row(client, "pair")
    os.kill(before["pid"], signal.SIGKILL)
    eventually(lambda: row(client, "pair")["generation"] == before["generation"] + 1)
    wait_for_state(client, "pair", "READY")
    assert row(client, "pair")["paused"] == [id]
    client.resume(id)
    result = ended(stream)
    assert (result.paused, result.resumed) == (1, 0), "it did not run when the worker died"

    stream = Reader(client, "pair", "hello", max_tokens=ENDLESS).started()
    pause(client, stream)
    stream.stream.cancel()
    assert stream.finished().finish_reason == "cancelled"
    eventually(lambda: row(client, "pair")["kept_bytes"] == 0)
    assert row(client, "pair")["paused"] == []
