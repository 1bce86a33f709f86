"""Large bodies at a real gateway: none holds up a stream; their readers end with the gateway."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxsup.gateway import limits

from support.daemon.daemon import fake, is_alive, row
from support.eventually import eventually
from support.gateway.http_daemon import CHAT, HttpDaemon, SseReader, chat, gateway_of
from support.gateway.large_bodies import (
    MESSAGES,
    LargeBody,
    hostile_bodies,
    meant_bodies,
    send,
    send_all,
)

PROBE = Path(__file__).parents[1] / "support" / "stall_probe"

WIDE = {"context_length": 3_900_000, "prefill_tokens_per_step": 1_000_000}
MODELS = {"m": fake(fake={"step_s": 0.005, **WIDE}), "other": fake(fake=WIDE)}


class Probed(HttpDaemon):
    """A daemon whose gateway says when a turn of its loop was long."""

    @property
    def turns(self) -> str:
        """The lines of its probe."""
        return (self.folder / "turns.txt").read_text()

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        probe = {"PYTHONPATH": str(PROBE), "MLXSUP_LOOP_PROBE": str(self.folder / "turns.txt")}
        super().start(environment={**(environment or {}), **probe})


@pytest.fixture(scope="module")
def daemon() -> Iterator[Probed]:
    with Probed(MODELS) as running:
        yield running
        assert re.fullmatch(r"started \d+\n", running.turns), running.turns


def test_hostile_bodies_are_refused_and_hold_up_no_stream(daemon: Probed) -> None:
    reader = SseReader(daemon, chat("beside them", max_tokens=2_000_000)).started()
    bodies = hostile_bodies(every=7)  # the campaign sends all of them
    for body, (status, _) in zip(bodies, send_all(daemon, bodies), strict=True):
        # Before a body that is too long was sent, the connection may have ended with the refusal.
        is_too_long = len(body.data) > limits.MAX_BODY_BYTES
        assert status in ((0, 413) if is_too_long else (200, 400, 413)), body.what
    assert reader.is_alive(), "its answer goes on"
    with daemon.client() as client:
        client.cancel(row(client, "m")["running"][0])
    assert re.fullmatch(r"started \d+\n", daemon.turns), daemon.turns


def test_long_bodies_that_are_meant_are_answered(daemon: Probed) -> None:
    bodies = meant_bodies()
    for body, (status, answer) in zip(bodies, send_all(daemon, bodies), strict=True):
        assert status == 200, (body.what, answer[:300])
        usage = json.loads(answer)["usage"]
        assert usage.get("input_tokens", usage.get("prompt_tokens")) > 140_000, body.what
    turns = [{"role": "user", "content": "x" * 300_000}]
    status, counted = daemon.post(MESSAGES + "/count_tokens", {"model": "m", "messages": turns})
    assert (status, counted["input_tokens"] > 300_000) == (200, True)


def test_a_gateway_that_is_killed_with_its_daemon_leaves_no_converter() -> None:
    slow = LargeBody("", CHAT, b'{"metadata":{' + b",".join(
        b'"%x":1' % n for n in range(700_000)) + b'},"wrong":1}')  # fmt: skip
    with HttpDaemon({"m": fake(preload=False)}) as daemon, daemon.client() as client:
        gateway = psutil.Process(gateway_of(client)["pid"])
        sender = threading.Thread(target=send, args=(daemon, slow))
        sender.start()
        converters = eventually(gateway.children, what="a converter that has begun")
        daemon.kill()
        os.kill(gateway.pid, signal.SIGKILL)
        sender.join()
        eventually(lambda: not any(map(is_alive, converters)), what="no converter")
