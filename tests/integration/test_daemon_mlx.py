"""The whole stack on real MLX: two models at once, and spare workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import Client
from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import Generate
from mlxsup.protocol.codec import encode, encode_body
from mlxsup.protocol.ids import ModelName, RequestId, unpack_tokens

from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, row
from support.eventually import eventually
from support.models.demo_model import demo_model_folder
from support.models.tiny_model import make_tiny_model
from support.reference import greedy_answers

pytestmark = pytest.mark.mlx

TOKENS = 80
"""Of an answer; those of two models differ long before."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny models that answer differently."""
    base = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(base / name, seed=n) for n, name in enumerate(("one", "two"))}


def test_two_models_at_once_each_answer_as_alone_though_one_is_killed_A8_F1(
    folders: dict[str, Path],
) -> None:
    prompts = [f"tell me about number {n}" for n in range(4)]
    truth = {name: greedy_answers(folder, prompts, TOKENS) for name, folder in folders.items()}
    assert truth["one"] != truth["two"]
    models: dict[str, dict[str, Any]] = {
        "one": {"path": str(folders["one"]), "max_concurrency": 1},
        "two": {"path": str(folders["two"])},
    }
    with Daemon(models) as daemon, daemon.client() as client:
        for name in models:
            client.load(name)
        pids = {name: row(client, name)["pid"] for name in models}
        assert len(set(pids.values())) == 2
        victim = Reader(client, "one", prompts[0], max_tokens=3000, resume=False)
        others = [Reader(client, "two", prompt, max_tokens=TOKENS) for prompt in prompts]
        queued = [Reader(client, "one", prompt, max_tokens=TOKENS) for prompt in prompts]
        victim.started()
        eventually(lambda: row(client, "one")["queued"] == len(prompts))
        os.kill(pids["one"], signal.SIGKILL)
        assert victim.failed().code == "worker_crashed"
        assert victim.tokens[:TOKENS] == truth["one"][0][: len(victim.tokens)]
        for reader, expected in zip(others, truth["two"], strict=True):
            assert reader.finished(600).token_ids == expected
        for reader, expected in zip(queued, truth["one"], strict=True):
            assert reader.finished(600).token_ids == expected
        assert row(client, "one")["generation"] == 2
        assert row(client, "two")["generation"] == 1


@pytest.mark.timeout(600)
def test_eight_tokens_twice_at_once_of_a_real_model_J3() -> None:
    """The first thing that must work. Both share their steps, and answer as alone."""
    folder = demo_model_folder()
    prompts = ["The capital of France is", "One, two, three,"]
    expected = greedy_answers(folder, prompts, 8)
    answers = [list[int](), list[int]()]
    shared_steps = 0
    with Daemon({"m": {"path": str(folder)}}) as daemon, RawClient(daemon.endpoint) as client:
        # The first one makes the model load, so that both are there when it is ready.
        for number, prompt in enumerate(prompts):
            body = encode_body(RequestBody(prompt=prompt, max_tokens=8))
            client.say(encode(Generate(id=RequestId(str(number)), model=ModelName("m"), body=body)))
        while min(map(len, answers)) < 8:
            message = client.hear_any(500.0)
            assert message["type"] in ("alive", "deltas", "done")
            pieces = [one for one in message.get("deltas", ()) if one["tokens"]]
            for piece in pieces:
                answers[int(piece["id"])] += unpack_tokens(piece["tokens"])
            shared_steps += len(pieces) == 2
    assert answers == expected
    assert shared_steps > 0, "one behind the other"


WAIT_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "m", seed=3)


def waiting(client: Client) -> list[int]:
    """The pids of the spare workers that wait for a load."""
    workers: list[dict[str, Any]] = client.status()["spares"]["workers"]
    return [worker["pid"] for worker in workers if worker["state"] == "waiting"]


def one_waiting(client: Client, *, after: int | None = None) -> int:
    """The pid of the only one, once it waits, and is another one than that before it."""
    found: list[int] = []

    def waits() -> bool:
        found[:] = waiting(client)
        return len(found) == 1 and found != [after]

    eventually(waits, timeout_s=WAIT_S)
    return found[0]


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    return not psutil.pid_exists(pid)


def test_a_spare_is_taken_over_replaced_and_ended_with_its_daemon(
    folder: Path,
) -> None:
    entry = {"path": str(folder), "preload": True, "max_concurrency": 2}
    with Daemon({"m": entry}, {"spare_workers": 1}) as daemon, daemon.client() as client:
        whole = client.complete("m", prompt="tell me", max_tokens=60, seed=1)
        spare = one_waiting(client)
        assert row(client, "m")["pid"] != spare
        reader = Reader(client, "m", "tell me", max_tokens=60, seed=1)
        reader.started()
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["pid"] == spare, timeout_s=WAIT_S)
        assert reader.finished(600).token_ids == whole.token_ids
        assert row(client, "m")["generation"] == 2
        next_spare = one_waiting(client)
        assert next_spare != spare, "another one waits"
        assert daemon.log_text().count(f"generation=2 pid={spare} spare=yes") == 1

        os.kill(next_spare, signal.SIGKILL)
        last = one_waiting(client, after=next_spare)
        assert last != next_spare
        model = row(client, "m")
        assert (model["state"], model["generation"], model["restarts"]) == ("READY", 2, 1)
        assert "spare worker exited" in daemon.log_text()

        daemon.kill()
        eventually(lambda: is_gone(last), timeout_s=WAIT_S)
