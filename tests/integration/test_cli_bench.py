"""`mlxsup bench` on a daemon with the fake engine: its figures, its files and its ends."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError

from support.cli.cli import Piped, run_cli
from support.daemon.daemon import fake, wait_for_state
from support.eventually import eventually
from support.gateway.http_daemon import HttpDaemon
from support.gateway.json_schemas import problems

QUICK, SLOW = "quick", "slow"

SMALL = ("--prompt-tokens", "4,9", "--output-tokens", "5", "--concurrency", "1,3")
ENDLESS = ("--prompt-tokens", "4", "--output-tokens", "8", "--concurrency", "2",
           "--repeats", "1000")  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[HttpDaemon]:
    # An answer of the slow one takes long enough for something to happen meanwhile.
    models = {QUICK: fake(aliases=["q"]), SLOW: fake(fake={"step_s": 0.05}), "other": fake()}
    with HttpDaemon(models) as daemon, daemon.client() as client:
        for model in models:
            wait_for_state(client, model, "READY")
        yield daemon


def bench(daemon: HttpDaemon, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return run_cli("bench", *arguments, "--endpoint", daemon.endpoint, stdin=stdin)


def measured(daemon: HttpDaemon, *arguments: str, stdin: str = "") -> dict[str, Any]:
    """What the command prints for programs; it must be as published."""
    done = bench(daemon, *arguments, "--json", stdin=stdin)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert problems(done.stdout, ["bench"]) == []
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def is_idle(daemon: HttpDaemon) -> bool:
    with daemon.client() as client:
        return not client.requests()["requests"]


def steps_of(client: Any) -> int:
    return int(next(row["steps"] for row in client.status()["models"] if row["name"] == SLOW))


@pytest.mark.parametrize("through", ["zmq", "http"])
def test_every_size_is_measured_in_every_repeat_and_no_other_request_is_seen(
    daemon: HttpDaemon, through: str
) -> None:
    value = measured(daemon, QUICK, *SMALL, "--repeats", "2", "--through", through)
    sizes = ("prompt_tokens", "output_tokens", "concurrency")
    found = [tuple(cell[size] for size in sizes) for cell in value["cells"]]
    assert found == [(4, 5, 1), (4, 5, 3), (9, 5, 1), (9, 5, 3)]
    for cell in value["cells"]:
        assert cell["repeats"] == 2
        for name in ("first_token_s", "tokens_per_s", "prefill_tokens_per_s"):
            assert len(cell["figures"][name]["values"]) == 2, name
            assert cell["figures"][name]["low"] > 0, name
    assert (value["is_complete"], value["repeats"], value["through"]) == (True, 2, through)
    assert (value["other_requests"], value["other_models"], value["remarks"]) == (0, [], [])
    assert (value["interrupted_answers"], value["cached_tokens"]) == (0, 0)
    assert is_idle(daemon)


def test_through_http_a_key_is_needed_if_there_are_keys(daemon: HttpDaemon) -> None:
    made = run_cli("key", "new", "bench", "--json", "--endpoint", daemon.endpoint)
    key = json.loads(made.stdout)["key"]
    through = (QUICK, *SMALL, "--repeats", "1", "--through", "http")
    without = bench(daemon, *through)
    assert (without.returncode, without.stdout) == (1, "")
    assert "error: the gateway needs a key" in without.stderr
    wrong = bench(daemon, *through, "--key", "-", stdin="sk-mlxsup-wrong\n")
    assert wrong.returncode == 1
    assert "this API key does not exist" in wrong.stderr
    value = measured(daemon, *through, "--key", "-", stdin=f"{key}\n")
    assert value["is_complete"]
    assert key not in json.dumps(value)


def test_run_is_kept_and_compared_with(daemon: HttpDaemon, tmp_path: Path) -> None:
    kept, sizes = tmp_path / "quick.json", ("--prompt-tokens", "4", "--output-tokens", "4",
                                            "--concurrency", "1", "--repeats", "3")  # fmt: skip
    measured(daemon, QUICK, *sizes, "--output", str(kept))
    assert problems(kept.read_text(), ["bench"]) == []
    again = bench(daemon, QUICK, *sizes, "--output", str(kept))
    assert (again.returncode, again.stdout) == (64, "")
    assert f"{kept} exists" in again.stderr
    # Without sizes they are those of the file. A step of 50 ms against one of none.
    slow, fail = tmp_path / "slow.json", ("--fail-if-slower", "100")
    compared = (SLOW, "--repeats", "3", "--compare", str(kept))
    done = bench(daemon, *compared, *fail, "--output", str(slow))
    assert done.returncode == 1, done.stdout
    assert re.search(r"slower: 4 \+ 4 × 1: gap p50 .* was .*: takes [\d,]+% longer", done.stdout)
    assert "the conditions differ: model was quick and is slow now" in done.stdout
    other = (QUICK, "--prompt-tokens", "5", "--repeats", "3", "--compare", str(kept))
    done = bench(daemon, *other, *fail)
    assert done.returncode == 1, done.stdout
    assert "nothing could be compared with" in done.stdout
    assert f"hint: record {kept} again with the same sizes" in done.stderr
    assert bench(daemon, *other).returncode == 0
    faster = measured(daemon, QUICK, "--repeats", "3", "--compare", str(slow), *fail)
    assert faster["comparison"]["slower"] == []
    assert "gap_p50_s" in [one["figure"] for one in faster["comparison"]["faster"]]


def test_ctrl_c_prints_and_keeps_what_was_measured_and_ends_what_runs(
    daemon: HttpDaemon, tmp_path: Path
) -> None:
    kept = tmp_path / "run.json"
    with Piped(
        "bench", SLOW, *ENDLESS, "--output", str(kept), "--endpoint", daemon.endpoint
    ) as piped:
        while not piped.note().startswith("3/1000"):
            pass
        code, out, err = piped.interrupt()
    assert code == 130
    assert "Traceback" not in err
    assert "incomplete: only " in out
    assert "FIRST TOKEN" in out
    value = json.loads(kept.read_text())
    assert problems(kept.read_text(), ["bench"]) == []
    assert not value["is_complete"]
    assert 1 <= value["cells"][0]["repeats"] < 1000
    eventually(lambda: is_idle(daemon))


def test_failed_run_as_json_prints_its_error_alone_and_keeps_its_figures(
    daemon: HttpDaemon, tmp_path: Path
) -> None:
    kept = tmp_path / "run.json"
    more = ("--json", "--output", str(kept), "--endpoint", daemon.endpoint)
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
    assert problems(kept.read_text(), ["bench"]) == []
    assert not json.loads(kept.read_text())["is_complete"]
