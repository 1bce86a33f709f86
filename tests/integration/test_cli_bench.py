"""`mlxsup bench` on a daemon with the fake engine: its figures and its ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from mlxsup.client import RequestError

from support.cli.cli import Piped, run_cli
from support.daemon.daemon import Daemon, fake, wait_for_state
from support.eventually import eventually
from support.gateway.json_schemas import problems

QUICK, SLOW = "quick", "slow"

SMALL = ("--prompt-tokens", "4,9", "--output-tokens", "5", "--concurrency", "1,3")
ENDLESS = ("--prompt-tokens", "4", "--output-tokens", "8", "--concurrency", "2",
           "--repeats", "1000")  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # An answer of the slow one takes long enough for something to happen meanwhile.
    models = {QUICK: fake(aliases=["q"]), SLOW: fake(fake={"step_s": 0.05}), "other": fake()}
    with Daemon(models) as daemon, daemon.client() as client:
        for model in models:
            wait_for_state(client, model, "READY")
        yield daemon


def is_idle(daemon: Daemon) -> bool:
    with daemon.client() as client:
        return not client.requests()["requests"]


def steps_of(client: Any) -> int:
    return int(next(row["steps"] for row in client.status()["models"] if row["name"] == SLOW))


def test_every_size_is_measured_in_every_repeat_of_every_model(daemon: Daemon) -> None:
    measured = ("bench", "q", "other", *SMALL, "--repeats", "2", "--endpoint", daemon.endpoint)
    done = run_cli(*measured, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert problems(done.stdout, ["bench"]) == []
    value = json.loads(done.stdout)
    found = [tuple(cell.values())[:4] for cell in value["cells"]]
    sizes = [(4, 5, 1), (4, 5, 3), (9, 5, 1), (9, 5, 3)]
    assert found == [(model, *size) for model in (QUICK, "other") for size in sizes]
    for cell in value["cells"]:
        for name in ("first_token_s", "tokens_per_s"):
            assert len(cell["figures"][name]["values"]) == 2, name
            assert cell["figures"][name]["low"] > 0, name
    assert (value["is_complete"], value["remarks"]) == (True, []), "no other request is seen"
    assert is_idle(daemon)


def test_ctrl_c_prints_what_was_measured_and_ends_what_runs(daemon: Daemon) -> None:
    with Piped("bench", SLOW, *ENDLESS, "--endpoint", daemon.endpoint) as piped:
        while not piped.note().startswith("3/1000"):
            pass
        code, out, err = piped.interrupt()
    assert code == 130
    assert "Traceback" not in err
    assert "incomplete: only " in out
    assert "FIRST TOKEN" in out
    eventually(lambda: is_idle(daemon))


def test_failed_run_as_json_prints_its_error_alone(daemon: Daemon) -> None:
    more = ("--json", "--endpoint", daemon.endpoint)
    with daemon.client() as client, Piped("bench", SLOW, *ENDLESS, *more) as piped:

        def has_ended() -> bool:
            for one in client.requests()["requests"]:  # an answer that was cut short is no figure
                with suppress(RequestError):  # it has ended
                    client.cancel(one["id"])
            return piped.process.poll() is not None

        before = steps_of(client)
        eventually(lambda: steps_of(client) >= before + 60)
        eventually(has_ended)
        code, out, err = piped.end()
    assert (code, err) == (1, "")
    assert problems(out, [], is_error=True) == [], "one object"
    assert json.loads(out)["error"]["code"] == "broken_answer"
