"""Requests on a real daemon: who is next, what an answer holds, what is shown and what it costs."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import Channel, Client, FinishReason, Notice, RequestError, Result
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.cli.cli import command, run_cli
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

SLOW = fake(max_concurrency=1, fake={"step_s": 0.01})
ENDLESS = 4000
"""Tokens of an answer that is cancelled."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": SLOW}) as daemon:
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
    daemon: Daemon,
) -> None:
    with daemon.client() as client, daemon.client() as other:
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
        assert listed(other) == {}
        eventually(lambda: set(log_lines(daemon)) == {run_id, wait_id})
        lines = log_lines(daemon)
        assert " outcome=cancelled " in lines[run_id]
        assert f" completion_tokens={result.usage.completion_tokens} " in lines[run_id]
        assert re.search(r' client="process \d+@\d+"', lines[run_id])
        assert "secret" not in daemon.log_text()


def test_a_second_terminal_joins_from_the_first_token_and_leaves_without_a_trace(
    daemon: Daemon,
) -> None:
    with daemon.client() as client, daemon.client() as other:
        own = Reader(client, "m", "hello", max_tokens=300).started()
        id = str(own.stream.request_id)
        with other.attach(id) as left:
            next(left)
        joined = other.attach(id)
        text = "".join(delta.text for delta in joined)
        result = own.finished()
        assert (text, joined.result.token_ids) == (own.text, result.token_ids)
        assert joined.result.usage == result.usage
        assert result.token_ids == answer_tokens(encode_text("hello"), 300)


def test_the_log_level_changes_at_once_in_the_daemon_and_its_workers(daemon: Daemon) -> None:
    def logged() -> int:
        return daemon.log_text().count(" INFO request ended ")

    with daemon.client() as client:
        before = logged()
        client.complete("m", prompt="hi", max_tokens=3)
        eventually(lambda: logged() == before + 1)
        assert " DEBUG " not in daemon.log_text()
        client.log_level("debug")
        with pytest.raises(RequestError):
            client.complete("nobody", prompt="hi")
        eventually(lambda: " DEBUG request ended id=" in daemon.log_text())
        client.log_level("warning")
        client.complete("m", prompt="hi", max_tokens=3)
        assert logged() == before + 1
        client.log_level("info")


def test_keep_alive_of_zero_unloads_with_the_answer_and_another_keeps(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=3, keep_alive=-1)
        assert row(client, "m")["state"] == "READY"
        client.complete("m", prompt="hi", max_tokens=3, keep_alive=0)
        wait_for_state(client, "m", "STOPPED")


def test_a_load_with_another_context_length_takes_a_new_process_that_has_it(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        client.load("m")
        before = row(client, "m")
        client.load("m", context_length=64)
        after = row(client, "m")
        assert (after["context_length"], after["generation"]) == (64, before["generation"] + 1)
        client.reload()
        eventually(lambda: row(client, "m")["context_length"] == before["context_length"])


CLIENTS = """
[clients.nightly]
priority = "batch"
max_priority = "normal"
[clients.alice]
weight = 2
"""


@pytest.fixture(scope="module")
def held_daemon() -> Iterator[Daemon]:
    """One row, held by an answer without an end; five may wait for each client."""
    models = {"m": fake(max_concurrency=1, fake={"step_s": 0.1})}
    held_daemon = Daemon(models, {"max_queue_per_client": 5})
    with held_daemon.config.open("a") as config:
        config.write(CLIENTS)
    with held_daemon, held_daemon.client() as client:
        wait_for_state(client, "m", "READY")
        held = client.generate("m", prompt="held")
        eventually(lambda: row(client, "m")["running"] == [held.request_id])
        yield held_daemon
        held.cancel()
        for _ in held:
            pass


def line(client: Client) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = row(client, "m")["line"]
    return found


def test_connections_of_this_process_are_one_account_and_a_listed_name_is_another(
    held_daemon: Daemon,
) -> None:
    with held_daemon.client() as one, held_daemon.client() as two:
        readers = [
            Reader(client, "m", "x", max_tokens=1, client=f"invented {number}")
            for number, client in enumerate((one, two, one, two, one))
        ]
        eventually(lambda: row(one, "m")["queued"] == 5)
        with pytest.raises(RequestError) as caught:
            two.complete("m", prompt="x", max_tokens=1)
        assert caught.value.detail["limit"] == "max_queue_per_client"
        listed = Reader(two, "m", "x", max_tokens=1, client="alice")
        eventually(lambda: row(one, "m")["queued"] == 6)
        waiting = one.status()["queue"]["per_client"]
        [process] = {name for name in waiting if name != "alice"}
        assert process.startswith(f"process {os.getpid()}@")
        assert waiting == {process: 5, "alice": 1}
        for reader in (*readers, listed):
            reader.stream.cancel()
            reader.finished()


def test_classes_come_in_order_and_may_be_changed_by_hand(held_daemon: Daemon) -> None:
    with held_daemon.client() as client:
        asked = {
            name: Reader(client, "m", name, max_tokens=1, **more)
            for name, more in (
                ("nightly", {"client": "nightly"}),
                ("normal", {}),
                ("batch", {"priority": "batch"}),
                ("urgent", {"priority": "interactive"}),
            )
        }
        ids = {reader.stream.request_id: name for name, reader in asked.items()}
        eventually(lambda: row(client, "m")["queued"] == 4)
        assert [ids[one["id"]] for one in line(client)] == ["urgent", "normal", "nightly", "batch"]
        done = run_cli(
            "prioritize", asked["batch"].stream.request_id, "interactive",
            "--endpoint", held_daemon.endpoint,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        id = asked["batch"].stream.request_id
        assert done.stdout == f"{id} waits for m as interactive (was batch)\n"
        assert [ids[one["id"]] for one in line(client)] == ["batch", "urgent", "normal", "nightly"]
        number = next(one["number"] for one in line(client) if ids[one["id"]] == "nightly")
        assert client.prioritize(number, "interactive")["client"] == "nightly"
        shown = run_cli("status", "--endpoint", held_daemon.endpoint).stdout
        assert "waiting: 3 interactive, 1 normal" in shown
        for reader in asked.values():
            reader.stream.cancel()
            reader.finished()


def test_commands_of_one_terminal_are_one_account_and_a_program_is_its_own(
    held_daemon: Daemon,
) -> None:
    generate = command("generate", "m", "x", "--endpoint", held_daemon.endpoint)
    named = [*generate, "--client", "alice"]
    lines = [f"{shlex.join(one)} &" for one in (generate, generate, named)]
    # A session of its own: that of the tests may be led from outside their container.
    shell = ["sh", "-c", "\n".join([*lines, "wait"])]
    with (
        held_daemon.client() as client,
        subprocess.Popen(shell, start_new_session=True) as terminal,
    ):
        program = Reader(client, "m", "x", max_tokens=1)
        try:
            eventually(lambda: row(client, "m")["queued"] == 4)
            accounts = sorted(one["client"].partition(" ")[0] for one in line(client))
            assert accounts == ["alice", "process", "terminal", "terminal"]
            assert len({one["client"] for one in line(client)}) == 3
        finally:
            os.killpg(terminal.pid, signal.SIGTERM)
            program.stream.cancel()
            program.finished()


CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


def test_reasoning_calls_logprobs_and_warnings_arrive() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        said = f"<think>hm</think>Look <tool_call>{CALL}</tool_call> and <tool_call>oops"
        stream = client.generate(
            "m",
            messages=[{"role": "user", "content": f"[[say {said}]]"}],
            tools=[{"type": "function", "function": {"name": "weather"}}],
            seed=4,
            logprobs=True,
            top_logprobs=2,
            top_k=5,
        )
        deltas = list(stream)
        result = stream.result
        assert result is not None
        assert result.reasoning == "hm"
        assert result.text == "Look  and <tool_call>oops"
        (call,) = result.tool_calls
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert result.finish_reason is FinishReason.TOOL_CALLS
        assert len(result.warnings) == 1
        assert result.logprobs is not None
        assert [entry.chosen.token for entry in result.logprobs] == result.token_ids
        assert len(result.logprobs[0].top) == 2
        assert {delta.channel for delta in deltas} == set(Channel)
        assert result.usage.completion_tokens == len(result.token_ids)
        plain = client.complete("m", prompt="x", max_tokens=3)
        assert (plain.logprobs, plain.warnings, plain.tool_calls) == (None, [], [])


STEP_S = 0.02
TOKENS = 5


@pytest.fixture
def charging_daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake(fake={"step_s": STEP_S})}) as running:
        yield running


def test_an_answer_costs_the_steps_that_were_made_for_it(charging_daemon: Daemon) -> None:
    with charging_daemon.client() as client:
        results = [client.complete("m", prompt="one", max_tokens=n) for n in (TOKENS, 1)]
        found = row(client, "m")
    paid_s = [result.usage.engine_s for result in results]
    assert [round(seconds / STEP_S, 3) for seconds in paid_s] == [TOKENS, 1]
    assert math.isclose(found["engine_s"], sum(paid_s))
    assert found["repeated_s"] == 0.0


def test_reading_a_prompt_again_after_a_crash_is_free(charging_daemon: Daemon) -> None:
    """The fake engine reads the prompt in the step of the first token, which is half of it."""
    prompt = "one [[fault crash=SIGKILL at=3 generation=1]]"
    with charging_daemon.client() as client:
        result = client.complete("m", prompt=prompt, max_tokens=TOKENS)
        found = row(client, "m")
    assert result.resumed == 1
    assert round(found["repeated_s"] / STEP_S, 3) == 0.5
    assert round(result.usage.engine_s / STEP_S, 3) == TOKENS - 0.5
    assert math.isclose(found["engine_s"], result.usage.engine_s)


SLOW_PAIR = fake(max_concurrency=2, fake={"step_s": 0.01})


@pytest.fixture(scope="module")
def pausing_daemon() -> Iterator[Daemon]:
    with Daemon({"m": SLOW_PAIR}) as daemon:
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


def test_a_stream_that_is_paused_and_resumed_has_every_token_once_C11(
    pausing_daemon: Daemon,
) -> None:
    with pausing_daemon.client() as client:
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


def test_a_worker_that_dies_takes_the_state_and_not_the_answer(pausing_daemon: Daemon) -> None:
    with pausing_daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        id = pause(client, stream)
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["generation"] == 2)
        wait_for_state(client, "m", "READY")
        assert row(client, "m")["paused"] == [id]
        client.resume(id)
        result = ended(stream)
        assert (result.paused, result.resumed) == (1, 0), "it did not run when the worker died"


def test_a_paused_stream_can_be_cancelled_and_leaves_nothing(pausing_daemon: Daemon) -> None:
    with pausing_daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        pause(client, stream)
        stream.stream.cancel()
        assert stream.finished().finish_reason == "cancelled"
        eventually(lambda: row(client, "m")["kept_bytes"] == 0)
        assert row(client, "m")["paused"] == []


@pytest.mark.mlx
@pytest.mark.bits
@pytest.mark.parametrize("name", ["gemma3_text"])
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


def test_idle_unload_meets_a_new_request_I5() -> None:
    model = fake(idle_unload_s=0.3, preload=False)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        for number in range(6):
            assert client.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
            if number % 2:
                wait_for_state(client, "m", ("DRAINING", "STOPPING", "STOPPED"))
        wait_for_state(client, "m", "STOPPED")
        after = row(client, "m")
        assert (after["wanted"], after["why"]) == ("down", "idle")
        assert after["generation"] > 1
        assert after["restarts"] == 0


# ---------------------------------------------------------------- being told


def test_a_waiting_request_gets_notices_of_its_progress() -> None:
    model = fake(fake={"load_s": 1.0, "prefill_tokens_per_step": 16}, preload=False)
    told: list[Notice] = []
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        result = client.complete("m", prompt="x" * 200, max_tokens=3, on_notice=told.append)
        assert result.finish_reason == "length"
    kinds = [str(notice.kind) for notice in told]
    assert kinds[0] == "queued"
    assert told[0].detail == {"position": 1, "reason": "load", "since_s": 0.0}
    assert list(dict.fromkeys(kinds)) == ["queued", "loading", "prefilling"]
    fractions = [n.detail["fraction"] for n in told if str(n.kind) == "loading"]
    assert fractions == sorted(fractions)
    assert len(set(fractions)) > 2
    done = [n.detail["done"] for n in told if str(n.kind) == "prefilling"]
    assert done == sorted(done)


def test_many_waiting_requests_are_served_without_a_flood_of_notices() -> None:
    waiting = 100
    limits = {"max_queue": waiting, "max_queue_per_client": waiting}
    model = fake(fake={"step_s": 0.002}, max_concurrency=4)
    told: list[Notice] = []
    with Daemon({"m": model}, limits) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        streams = [
            client.generate("m", prompt="x", max_tokens=2, on_notice=told.append)
            for _ in range(waiting)
        ]
        for stream in streams:
            assert len(list(stream)) == 2
            assert stream.result.finish_reason == "length"
    assert waiting < len(told) < 20 * waiting
