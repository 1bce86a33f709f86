"""Chat templates and configurations that take memory without end: found in time, with a cause."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.client import RequestError

from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import PATIENT, undisturbed
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

BOMBS = {
    "piles": "{% set n = namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(9) %}"
    "{% set n.x = [n.x, 'a' * 1000000 ~ j] %}{% endfor %}{% endfor %}",
    "holds": "{{ ([(range(99999) | list) * 1000] * 99) | sum(start=[]) | length }}",
}
"""One loop in Python, and one call that holds the interpreter."""

CAUSES = {"piles": "prompt of request", "holds": "no sign of life for"}

TEMPLATE = (
    "".join(
        "{% if '" + name + "' in messages[0].content %}" + BOMBS[name] + "{% endif %}"
        for name in BOMBS
    )
    + "{{ messages[0].content }}"
)
MOST_BYTES = 6 * 2**30
"""Far below what a minute of these templates takes, and far above what the limits allow."""


class Peak:
    """The largest size that any child of a process has had."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._parent = psutil.Process(pid)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
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
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    models = {
        "real": {"path": str(folder), "preload": True, "restart": PATIENT},
        "other": fake(fake={"step_s": 0.005}),
    }
    with Daemon(models) as daemon:
        yield daemon


@pytest.mark.parametrize("what", BOMBS)
def test_a_template_that_takes_all_memory_is_ended_with_its_cause(
    daemon: Daemon, what: str
) -> None:
    assert daemon.process is not None
    daemon.provoke("ERROR", model="real", pattern="takes more than", at_most=1)
    with daemon.client() as client, Peak(daemon.process.pid) as peak:
        generation = wait_for_state(client, "real", "READY")["generation"]
        other = Reader(client, "other", f"beside {what}", max_tokens=400).started()
        bomb = client.generate(
            "real", messages=[{"role": "user", "content": what}], max_tokens=3, timeout_s=1.0
        )
        with pytest.raises(RequestError):
            list(bomb)
        eventually(lambda: row(client, "real")["generation"] == generation + 1, timeout_s=120.0)
        last_exit = row(client, "real")["last_exit"]
        assert CAUSES[what] in last_exit["detail"]
        wait_for_state(client, "real", "READY")
        fine = [{"role": "user", "content": "fine"}]
        assert client.complete("real", messages=fine, max_tokens=3).finish_reason == "length"
        assert other.finished().token_ids == undisturbed(f"beside {what}", 400)
    assert peak.bytes < MOST_BYTES


def test_a_model_of_a_billion_is_refused_before_it_is_built(tmp_path: Path) -> None:
    name = "hidden_size"  # the others: tests/mlx/test_limits.py
    folder = make_tiny_model(tmp_path / "m")
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {name: 10**9}))
    with Daemon({"m": {"path": str(folder), "preload": True}}) as daemon:
        daemon.provoke("ERROR", model="m", pattern=f"{name} is 1000000000", at_most=1)
        with daemon.client() as client:
            found = wait_for_state(client, "m", "FAILED")
    assert (found["last_exit"]["code"], found["generation"]) == (65, 1)
    assert f"{config}: {name} is 1000000000; " in found["last_exit"]["detail"]
