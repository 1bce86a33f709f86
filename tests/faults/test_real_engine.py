"""A worker of MLX whose pass raises or never ends, and prompts that take all time or memory.

Real: daemons, and MLX with a tiny model. The same with the fake engine: test_worker_deaths.py.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.client import RequestError

from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

LIMIT_S = 2.0
"""Ten times what any honest step of the tiny model takes on a busy machine."""


@pytest.mark.bits
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        pytest.param("pass raises", "crash", id="raises"),
        pytest.param("pass holds", "stall", id="never ends, interpreter held"),
    ],
)
def test_a_pass_that_raises_or_never_ends_ends_the_worker_and_the_answer_continues_F3_F5_F6(
    tmp_path: Path, what: str, reason: str
) -> None:
    entry = {"path": str(make_tiny_model(tmp_path / "tiny")), "preload": True, "restart": PATIENT}
    models = {"m": entry | {"step_timeout_s": LIMIT_S}, "other": fake(fake={"step_s": 0.02})}
    with LossyDaemon(what, models) as daemon, daemon.client() as client:
        if what == "pass raises":
            daemon.provoke("Traceback", model="m", pattern=r"ValueError: \[matmul\]", at_most=1)
        wait_for_state(client, "m", "READY")
        assert not daemon.struck.exists(), "the load is not struck"
        other = Reader(client, "other", "undisturbed", max_tokens=200)
        struck = client.complete("m", prompt="Once upon", max_tokens=60)
        assert (struck.resumed, len(struck.token_ids)) == (1, 60)
        again = client.complete("m", prompt="Once upon", max_tokens=60)
        assert (again.resumed, again.token_ids) == (0, struck.token_ids)
        assert other.finished().token_ids == undisturbed("undisturbed", 200)
        assert row(client, "other")["generation"] == 1
        last_exit = row(client, "m")["last_exit"]
        assert (row(client, "m")["generation"], last_exit["reason"]) == (2, reason)
        if reason == "crash":
            assert daemon.struck.read_text() == "x", "not one pass after the one that raised"
            assert last_exit["code"] == 70
            assert "ValueError: [matmul]" in last_exit["detail"]
        else:
            log = daemon.log_text()
            assert "most recent call first" in log
            assert "in compute_and_act" in log, "the pass"
            assert "engines/mlx/batch.py" in log, "who called the pass"


# ---------------------------------------------------------------- prompts without end

MOST_BYTES = 6 * 2**30
"""Far below what a minute of these templates takes, and far above what the limits allow."""
TEMPLATES = {
    "piles": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(9) %}"
    "{% set n.x = [n.x, 'a' * 1000000 ~ j] %}{% endfor %}{% endfor %}",
    "holds": "{{ ([(range(99999) | list) * 1000] * 99) | sum(start=[]) | length }}",
}
"""Endless, in Python and in one call that holds the interpreter; both take memory. One that takes
time alone: tests/integration/test_worker_process.py."""
CAUSES = {"piles": "prompt of request", "holds": "no sign of life for|did not end in"}
"""Words of the exit's detail. The moment at which the interpreter is held decides whether the loop
or its heartbeat is missed first."""


class Peak(threading.Thread):
    """The largest size that any child of a process has had."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._parent, self._end = psutil.Process(pid), threading.Event()

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self.join()

    def run(self) -> None:
        while not self._end.wait(0.05):
            for child in self._parent.children():
                try:
                    self.bytes = max(self.bytes, child.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "real")
    config = folder / "tokenizer_config.json"
    choice = "".join(
        "{% if '" + name + "' in messages[0].content %}" + text + "{% endif %}"
        for name, text in TEMPLATES.items()
    )
    template = {"chat_template": choice + "{{ messages[0].content }}"}
    config.write_text(json.dumps(json.loads(config.read_text()) | template))
    entry = {"path": str(folder), "preload": True, "restart": PATIENT}
    real = entry | {"step_timeout_s": LIMIT_S}
    with Daemon({"real": real, "other": fake(fake={"step_s": 0.005})}) as daemon:
        yield daemon


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_template_without_end_is_found_in_time_and_memory_P6(daemon: Daemon, what: str) -> None:
    assert daemon.process is not None
    daemon.provoke("ERROR", model="real", pattern="takes more than", at_most=1)
    with daemon.client() as client, Peak(daemon.process.pid) as peak:
        generation = wait_for_state(client, "real", "READY")["generation"]
        other = Reader(client, "other", f"beside {what}", max_tokens=400).started()
        stuck = client.generate(
            "real", messages=[{"role": "user", "content": what}], max_tokens=3, timeout_s=0.5
        )
        with pytest.raises(RequestError) as caught:
            list(stuck)
        assert caught.value.code == "deadline_exceeded", "its own limit holds all the same"
        eventually(lambda: row(client, "real")["generation"] == generation + 1, timeout_s=120.0)
        assert re.search(CAUSES[what], row(client, "real")["last_exit"]["detail"])
        wait_for_state(client, "real", "READY")
        fine = [{"role": "user", "content": "fine"}]
        assert client.complete("real", messages=fine, max_tokens=3).finish_reason == "length"
        assert other.finished().token_ids == undisturbed(f"beside {what}", 400)
    assert peak.bytes < MOST_BYTES


@pytest.mark.parametrize("regex", ["(x+x+)+y", "(((a{0,100}){0,100}){0,100})", "(.*a.{400})*"])
def test_no_regex_of_a_request_stalls_an_engine_P6(daemon: Daemon, regex: str) -> None:
    """Those that other matchers take for ever with; `structured` promises no backtracking."""
    with daemon.client() as client:
        generation = wait_for_state(client, "real", "READY")["generation"]
        beside = Reader(client, "real", "beside", max_tokens=40)
        form = {"type": "regex", "regex": regex}
        result = client.complete("real", prompt="x", max_tokens=20, response_format=form)
        assert result.finish_reason in ("length", "stop")
        assert set(result.text) <= set("axyb") or ".*" in regex
        assert beside.finished().usage.completion_tokens == 40
        assert row(client, "real")["generation"] == generation
