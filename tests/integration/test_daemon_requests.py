"""Requests that one can see on real daemons: who they are, how they end, how long models stay."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.client import Client, RequestError
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from support.cli import Piped, on_terminal, run_cli
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

SLOW = fake(max_concurrency=1, fake={"step_s": 0.01})
ENDLESS = 4000
"""Tokens of an answer that is cancelled."""


@pytest.fixture
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


def test_the_table_holds_in_any_width_and_following_has_a_line_for_each_change(
    daemon: Daemon,
) -> None:
    with daemon.client() as client:
        stream = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        id = str(stream.stream.request_id)
        for width in (40, 80, 200):
            shown = on_terminal(["requests", "--endpoint", daemon.endpoint], COLUMNS=str(width))
            plain = re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\r", "")
            assert id in plain
            assert max(map(len, plain.splitlines())) <= width
        with Piped("requests", "-f", "--json", "--endpoint", daemon.endpoint) as piped:
            states = [json.loads(piped.line())["state"]]
            client.cancel(id)
            states.append(json.loads(piped.line())["state"])
            code, _, err = piped.interrupt()
        assert (states, code, err) == (["answering", "ended"], 0, "")
        assert run_cli("requests", "--endpoint", daemon.endpoint).stdout == "no open requests\n"


def test_requests_of_one_client_are_followed_and_those_of_others_are_not(daemon: Daemon) -> None:
    asked = ["generate", "m", "hello", "--max-tokens", str(ENDLESS), "--endpoint", daemon.endpoint]
    with daemon.client() as client, Piped(*asked):
        eventually(lambda: len(listed(client)) == 1)
        (other,) = listed(client)
        own = Reader(client, "m", "hello", max_tokens=ENDLESS)
        id = str(own.stream.request_id)
        eventually(lambda: id in listed(client))
        account = listed(client)[id]["client"]
        followed = ["requests", "-f", "--json", "--client", account, "--endpoint", daemon.endpoint]
        with Piped(*followed) as piped:
            ids = [json.loads(piped.line())["id"]]
            client.cancel(other)
            client.cancel(id)
            while (seen := json.loads(piped.line()))["state"] != "ended":
                ids.append(seen["id"])
        assert {*ids, seen["id"]} == {id}


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


def test_attach_prints_the_whole_answer_and_waits_for_one_that_waits(daemon: Daemon) -> None:
    with daemon.client() as client:
        first = Reader(client, "m", "hello", max_tokens=ENDLESS).started()
        second = Reader(client, "m", "other", max_tokens=ENDLESS)
        id = str(second.stream.request_id)
        eventually(lambda: id in listed(client))
        with Piped("attach", id, "--endpoint", daemon.endpoint) as piped:
            assert piped.note().startswith(f"{id} of m: waiting, place 1")
            first.stream.cancel()
            eventually(piped.has_output)
            second.stream.cancel()
            code, out, err = piped.end()
        assert (out, err, code) == (second.finished().text, "", 0)


def test_the_log_level_changes_at_once_in_the_daemon_and_its_workers(daemon: Daemon) -> None:
    with daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=3)

        def debug_lines() -> int:
            return daemon.log_text().count(" DEBUG ")

        assert debug_lines() == 0
        client.log_level("debug")
        with pytest.raises(RequestError):
            client.complete("nobody", prompt="hi")
        eventually(lambda: " DEBUG request ended id=" in daemon.log_text())
        client.log_level("warning")
        client.complete("m", prompt="hi", max_tokens=3)
        assert daemon.log_text().count(" INFO request ended ") == 1


def test_a_log_of_json_has_an_object_on_each_line() -> None:
    with Daemon({"m": SLOW}, {"log_format": "json"}) as daemon, daemon.client() as client:
        client.complete("m", prompt="hi", max_tokens=3)

        def lines() -> list[dict[str, Any]]:
            text = (daemon.logs / "mlxsup.log").read_text()
            return [json.loads(line) for line in text.splitlines()]

        [ended] = eventually(lambda: [one for one in lines() if one["message"] == "request ended"])
        assert (ended["model"], ended["outcome"], ended["completion_tokens"]) == ("m", "length", 3)


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
        wait_for_state(client, "m", "READY")
        before = row(client, "m")
        client.load("m", context_length=64)
        after = row(client, "m")
        assert (after["context_length"], after["generation"]) == (64, before["generation"] + 1)
        client.reload()
        eventually(lambda: row(client, "m")["context_length"] == before["context_length"])
