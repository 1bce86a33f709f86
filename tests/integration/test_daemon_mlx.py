"""Whole daemons on real MLX: two models, prewarmed workers, secrets and the prefix cache."""

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
from mlxsup.worker.idle_time import GIVE_BACK_AFTER_S

from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, row
from support.eventually import TIMEOUT_S, eventually
from support.gateway.http_daemon import HttpDaemon, gateway_of
from support.models.tiny_model import make_tiny_model
from support.reference import greedy_answers

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(900)]

NAMES = ("one", "two")
PROMPTS = [f"tell me about number {n}" for n in range(4)]
TOKENS = 60
"""Of an answer; those of the two models differ long before."""


def heard_together(daemon: Daemon, model: str, prompts: list[str], count: int) -> list[list[int]]:
    """Answers of so many tokens to prompts that are asked at once; fails if no step had both."""
    answers = [list[int]() for _ in prompts]
    shared_steps = 0
    with RawClient(daemon.endpoint) as client:
        for number, prompt in enumerate(prompts):
            body = encode_body(RequestBody(prompt=prompt, max_tokens=count))
            name = ModelName(model)
            client.say(encode(Generate(id=RequestId(str(number)), model=name, body=body)))
        while min(map(len, answers)) < count:
            message = client.hear_any(500.0)
            assert message["type"] in ("alive", "deltas", "done")
            pieces = [one for one in message.get("deltas", ()) if one["tokens"]]
            for piece in pieces:
                answers[int(piece["id"])] += unpack_tokens(piece["tokens"])
            shared_steps += len(pieces) == len(prompts)
    assert shared_steps > 0, "one behind the other"
    return answers


def test_two_models_at_once_each_answer_as_alone_though_one_is_killed_A8_F1_J3(
    tmp_path: Path,
) -> None:
    """One, whose queue outlives its process, is held to plain mlx-lm."""
    folders = {name: make_tiny_model(tmp_path / name, seed=n) for n, name in enumerate(NAMES)}
    truth = greedy_answers(folders["one"], PROMPTS, TOKENS)
    models: dict[str, dict[str, Any]] = {
        "one": {"path": str(folders["one"]), "max_concurrency": 1},
        "two": {"path": str(folders["two"])},
    }
    with Daemon(models) as daemon, daemon.client() as client:
        # The first of its requests makes the model load, so that both are there when it is ready.
        pair = heard_together(daemon, "two", PROMPTS[:2], TOKENS)
        alone = [client.complete("two", prompt=p, max_tokens=TOKENS).token_ids for p in PROMPTS[:2]]
        assert pair == alone != truth[:2]
        client.load("one")
        pids = {name: row(client, name)["pid"] for name in NAMES}
        assert len(set(pids.values())) == 2
        victim = Reader(client, "one", PROMPTS[0], max_tokens=3000, resume=False)
        queued = [Reader(client, "one", prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        victim.started()
        eventually(lambda: row(client, "one")["queued"] == len(queued))
        others = [Reader(client, "two", prompt, max_tokens=TOKENS) for prompt in PROMPTS[:2]]
        os.kill(pids["one"], signal.SIGKILL)
        assert victim.failed().code == "worker_crashed"
        assert victim.tokens[:TOKENS] == truth[0][: len(victim.tokens)]
        assert [reader.finished(600).token_ids for reader in others] == alone
        assert [reader.finished(600).token_ids for reader in queued] == truth
        assert [row(client, name)["generation"] for name in NAMES] == [2, 1]


def test_libraries_that_others_leave_in_the_temporary_folder_do_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX builds what it fuses on a CPU in `mlx` there; another user's is as closed as a file."""
    folder = make_tiny_model(tmp_path / "m")
    truth = greedy_answers(folder, PROMPTS[:1], TOKENS)
    shared = tmp_path / "tmp"
    shared.mkdir()
    (shared / "mlx").touch()
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("MLXSUP_NEW_CHILDREN", "1")
    with Daemon({"m": {"path": str(folder)}}) as daemon, daemon.client() as client:
        answer = client.complete("m", prompt=PROMPTS[0], max_tokens=TOKENS)
    assert answer.token_ids == truth[0]


WAIT_S = 120.0
SECRETS = {
    "HF_TOKEN": "hf_secret",
    "HUGGING_FACE_HUB_TOKEN": "hf_secret",
    "OPENAI_API_KEY": "sk-secret",
    "MLXSUP_API_KEY": "key-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "AWS_SESSION": "opaque-secret",
    "DATABASE_URL": "postgres://u:pw-secret@h/db",
    "HF_ENDPOINT": "https://u:pw-secret@mirror.example",
    "https_proxy": "http://u:pw-secret@proxy.example",
    "GITHUB_PAT": "ghp-secret",
    "XDG_SESSION_COOKIE": "cookie-secret",
}
NEEDED = {"HF_HUB_CACHE": "/models", "MLX_METAL_FAST_SYNCH": "1", "OMP_NUM_THREADS": "2"}


class DaemonWithSecrets(HttpDaemon):
    """A daemon with a gateway that was started with everything above in its environment."""

    def start(self, *, environment: dict[str, str] | None = None) -> None:
        """Starts it and returns when its gateway answers."""
        super().start(environment={**SECRETS, **NEEDED, "MLXSUP_NEW_CHILDREN": "1"})


def check_environment(pid: int) -> None:
    found = psutil.Process(pid).environ()
    assert [name for name in found if "secret" in found[name]] == []
    assert found.items() >= NEEDED.items()
    assert found["PATH"] == os.environ["PATH"]


def one_waiting(client: Client, *, after: int | None = None) -> int:
    """The pid of the only prewarmed worker, once it waits for a load and is not that before it."""

    def waits() -> int | None:
        workers: list[dict[str, Any]] = client.status()["warm_pool"]["workers"]
        pids = [worker["pid"] for worker in workers if worker["state"] == "waiting"]
        return pids[0] if len(pids) == 1 and pids != [after] else None

    return eventually(waits, timeout_s=WAIT_S)


def test_prewarmed_workers_take_over_without_secrets_and_end_with_their_daemon(
    tmp_path: Path,
) -> None:
    entry = {
        "path": str(make_tiny_model(tmp_path / "m", seed=3)), "preload": True,
        "max_concurrency": 2, "prefix_cache": "64MiB",
    }  # fmt: skip
    prompt = "tell me about memory " * 20
    asked: dict[str, Any] = {"max_tokens": 60, "temperature": 0}
    with DaemonWithSecrets({"m": entry}, {"warm_workers": 1}) as daemon, daemon.client() as client:
        whole = client.complete("m", prompt=prompt, **asked)
        prewarmed = one_waiting(client)
        for pid in (row(client, "m")["pid"], gateway_of(client)["pid"], prewarmed):
            check_environment(pid)

        # An idle worker frees its memory for reuse long before it gives known prompts up, too.
        assert GIVE_BACK_AFTER_S > 2 * TIMEOUT_S
        eventually(lambda: (seen := row(client, "m"))["cache_bytes"] == 0 < seen["prefix_bytes"])
        again = client.complete("m", prompt=prompt, **asked)
        assert (again.usage.cached_tokens > 0, again.token_ids) == (True, whole.token_ids)

        reader = Reader(client, "m", prompt, **asked).started()
        os.kill(row(client, "m")["pid"], signal.SIGKILL)
        eventually(lambda: row(client, "m")["pid"] == prewarmed, timeout_s=WAIT_S)
        assert reader.finished(600).token_ids == whole.token_ids
        assert row(client, "m")["generation"] == 2
        next_one = one_waiting(client, after=prewarmed)
        assert daemon.log_text().count(f"generation=2 pid={prewarmed} prewarmed=yes") == 1

        os.kill(next_one, signal.SIGKILL)
        last = one_waiting(client, after=next_one)
        model = row(client, "m")
        assert (model["state"], model["generation"], model["restarts"]) == ("READY", 2, 1)
        assert "prewarmed worker exited" in daemon.log_text()

        daemon.kill()
        eventually(lambda: not psutil.pid_exists(last), timeout_s=WAIT_S)
