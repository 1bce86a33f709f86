"""The whole shell in this process: what the core decides is done, once, to the right parts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import stat
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxsup.client import AsyncClient, RequestError
from mlxsup.client.async_streams import AsyncStream
from mlxsup.protocol.client_messages import (
    Deltas,
    Done,
    Reload,
    Reply,
    StatusQuery,
)
from mlxsup.protocol.delta import DeltaBody, pack_body
from mlxsup.protocol.ids import RequestId, pack_tokens
from mlxsup.protocol.launch import ExitCode
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.step_batch import PackedRow
from mlxsup.protocol.version import VERSION
from mlxsup.protocol.worker_messages import CancelRow, Dying, Ready, RowDelta, Step
from mlxsup.supervisor.core import watchdog as watchdog_module
from mlxsup.supervisor.memory.machine import find_backend
from mlxsup.supervisor.workers import instance as incarnation_module

from support.client.pieces import texts_of
from support.daemon.played_daemon import Peer, Stage, generate, play, short_folder, token
from support.eventually_async import eventually_async
from support.models.safetensors_files import llama_arrays, llama_config, write_folder

LARGE = "x" * (1024 * 1024)


async def status(peer: Peer, model: str = "a") -> dict[str, Any]:
    """A model's row of the status."""
    reply = await peer.ask(StatusQuery(id=RequestId("status")), Reply)
    rows: list[dict[str, Any]] = reply.value["models"]
    return {row["name"]: row for row in rows}[model]


def recorded(folder: Path) -> list[tuple[str, int]]:
    """What workers.json says."""
    entries = json.loads((folder / "run" / "workers.json").read_bytes())
    return [(entry["model"], entry["pid"]) for entry in entries]


def test_a_request_is_served_and_the_end_leaves_nothing() -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        assert recorded(stage.folder) == [("a", worker.pid)]
        peer = stage.peer()
        await peer.say(generate())
        key = await worker.accept()
        await worker.step(token(key, 1))
        assert texts_of(await peer.hear(Deltas)) == ["1 "]
        await worker.step(token(key, 2, is_last=True))
        assert texts_of(await peer.hear(Deltas)) == ["2 "]
        done = await peer.hear(Done)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.seed) == (2, 2, 7)
        pids.append(worker.pid)

    pids: list[int] = []
    with short_folder() as folder:
        assert play(body, folder=folder) == 0
        assert sorted(path.name for path in (folder / "run").iterdir()) == [
            "key_file",
            "lock",
            "log_dir",
            "workers.json",
        ]
        assert recorded(folder) == []
        log = (folder / "logs" / "mlxsup.log").read_text()
    assert not psutil.pid_exists(pids[0])
    for line in (
        f"INFO daemon started version={VERSION} endpoint=ipc://{folder}/run/client.sock",
        f"INFO worker spawned model=a generation=1 pid={pids[0]}",
        "INFO model ready model=a batching=together",
        f"INFO worker exited model=a generation=1 pid={pids[0]} signal=SIG",
        "INFO daemon ended code=0",
    ):
        assert log.count(line) == 1, line


def test_everything_it_makes_is_for_its_user_alone() -> None:
    async def body(stage: Stage) -> None:
        await stage.ready()
        made = [path for name in ("run", "logs") for path in (stage.folder / name).rglob("*")]
        assert {"client.sock", "w1.sock.beat", "lock", "workers.json", "a.log"} <= {
            path.name for path in made
        }
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made}
        assert set(modes.values()) == {0}, modes

    assert play(body) == 0


def test_the_status_says_which_daemon_answers_and_what_it_measured() -> None:
    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        peer = stage.peer()
        value = (await peer.ask(StatusQuery(id=RequestId("s")), Reply)).value
        assert (value["pid"], value["version"]) == (os.getpid(), VERSION)
        assert value["endpoint"] == stage.endpoint
        assert value["config_path"] == str(stage.folder / "config.toml")
        assert value["log_dir"] == str(stage.folder / "logs")
        assert value["memory"]["machine_bytes"] == psutil.virtual_memory().total
        row = await status(peer)
        for _ in range(1000):  # each asked when the one before was answered
            if row["footprint_bytes"]:
                break
            await asyncio.sleep(0.01)
            row = await status(peer)
        assert row["pid"] == worker.pid
        assert 0 < row["footprint_bytes"] < 64 * 1024 * 1024

    assert play(body) == 0


def test_each_life_has_a_socket_and_a_token_of_its_own_F9() -> None:
    async def body(stage: Stage) -> None:
        first = await stage.ready()
        first.die()
        second = await stage.ready(generation=2)
        assert (second.spec.log_level, second.spec.supervisor_pid) == ("warning", os.getpid())
        assert second.spec.token != first.spec.token
        assert second.spec.endpoint == f"ipc://{stage.folder}/run/w2.sock"
        assert not (stage.folder / "run" / "w1.sock").exists()
        assert not (stage.folder / "run" / "w1.sock.beat").exists()
        await eventually_async(lambda: recorded(stage.folder) == [("a", second.pid)])

    assert play(body, supervisor={"log_level": "warning"}) == 0


def test_an_exit_code_and_the_last_line_reach_the_status() -> None:
    async def body(stage: Stage) -> None:
        await stage.until("a", "FAILED")
        row = await status(stage.peer())
        exit_ = row["last_exit"]
        assert (exit_["code"], exit_["signal"]) == (ExitCode.MODEL_MISSING, None)
        assert exit_["detail"] == "no such folder"
        await stage.logged("first\nno such folder\n", "a")
        assert f"--- generation 1 pid {next(stage.folder.glob('*.spec')).stem} " in stage.log("a")

    assert play(body, process="echo first; echo no such folder >&2; exit 66") == 0


def test_last_words_are_read_though_the_connection_is_held_open() -> None:
    """By a grandchild, say: the exit counts after the limit, and what came before it is heard."""

    async def body(stage: Stage) -> None:
        peer, worker = stage.peer(), await stage.ready()
        await peer.say(generate())
        key = await worker.accept()
        # One of these is all that a turn of the loop takes from one socket.
        for number in range(1, 9):
            row = token(key, number)
            row.text = LARGE
            await worker.step(row)
        texts = [text for _ in range(8) for text in texts_of(await peer.hear(Deltas))]
        assert texts == [LARGE] * 8
        await worker.say(Dying(code=70, message="the last word"))
        os.kill(worker.pid, signal.SIGKILL)
        await stage.until("a", "PENDING")
        assert (await status(peer))["last_exit"]["detail"] == "the last word"

    assert play(body) == 0


ORPHAN = """
setsid sh -c 'touch "$0/up"; while kill -0 $1; do sleep 0.01; done; echo the end' "$0" $$ 2>&- &
while [ ! -e "$0/up" ]; do sleep 0.01; done
exit 66
"""
"""It prints when the worker itself has been reaped."""


@pytest.mark.skipif(shutil.which("setsid") is None, reason="needs setsid")
def test_output_after_an_exit_belongs_to_the_last_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(incarnation_module, "LAST_WORDS_S", 30.0)

    async def body(stage: Stage) -> None:
        await stage.until("a", "FAILED")
        assert (await status(stage.peer()))["last_exit"]["detail"] == "the end"

    assert play(body, process=ORPHAN) == 0


def test_a_model_that_a_reload_added_is_planned_for_once_another_was_measured(
    tmp_path: Path,
) -> None:
    """Both needs reach the core together: those of the file before the reload would lack it.

    The measurement counts although it cannot be kept for the next daemon.
    """
    for name in ("a", "b"):
        write_folder(tmp_path / name, llama_config(), llama_arrays())
    entries = {n: {"path": str(tmp_path / n), "preload": n == "a"} for n in ("a", "b")}

    async def body(stage: Stage) -> None:
        worker, peer = await stage.worker(), stage.peer()
        await worker.say(worker.hello())
        stage.write_config(entries)
        added = (await peer.ask(Reload(id=RequestId("r")), Reply)).value["added"]
        needed = (await status(peer, "b"))["needed_bytes"]
        backend = find_backend()
        await worker.say(
            Ready(context_length=4096, fingerprint="f", backend=backend, active_bytes=2**30)
        )
        async with asyncio.timeout(60.0):
            while (await status(peer))["needed_bytes"] < 2**30:
                pass  # each is asked when the one before was answered
        assert (added, (await status(peer, "b"))["needed_bytes"]) == (["b"], needed)
        assert needed > 0

    with short_folder() as folder:
        (folder / "run").mkdir(0o700)
        (folder / "run" / "measured.json").mkdir()
        assert play(body, {"a": entries["a"]}, folder=folder) == 0


def test_a_worker_that_was_stopped_is_found_by_its_state_F7(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdog_module, "SILENCE_S", 0.2)
    monkeypatch.setattr(watchdog_module, "RECHECK_S", 0.1)

    async def body(stage: Stage) -> None:
        worker = await stage.ready()
        os.kill(worker.pid, signal.SIGSTOP)
        await stage.ready(generation=2)
        exit_ = (await status(stage.peer()))["last_exit"]
        assert (exit_["reason"], exit_["signal"]) == ("stall", "SIGKILL")
        assert "stopped" in exit_["detail"]

    assert play(body) == 0


async def text_of(stream: AsyncStream) -> str:
    return "".join([delta.text async for delta in stream])


@pytest.mark.parametrize("body", [b"\xc1", b"\x91" * 9000])
def test_a_body_that_is_none_ends_its_stream_while_others_continue(body: bytes) -> None:
    async def script(stage: Stage) -> None:
        worker = await stage.ready()
        async with AsyncClient(stage.endpoint) as client:
            hurt = client.generate("a", prompt="x", max_tokens=4)
            first = await worker.accept()
            fine = client.generate("a", prompt="y", max_tokens=4)
            second = await worker.accept()
            bad = PackedRow(key=first, tokens=pack_tokens([7]), body=body)
            await worker.say(Step(step=1, rows=[token(second, 1), bad]))
            with pytest.raises(RequestError) as caught:
                await text_of(hurt)
            assert caught.value.code == "internal"
            assert "piece 0 of the stream cannot be read" in caught.value.message
            assert await worker.hear(CancelRow) == CancelRow(key=first)
            ended = RowDelta(key=first, finish=FinishReason.CANCELLED)
            last = PackedRow(
                key=second,
                tokens=pack_tokens([2]),
                body=pack_body(DeltaBody(text="2 ")),
                finish=FinishReason.STOP,
            )
            await worker.say(Step(step=2, rows=[ended, last], between_steps=1))
            assert await text_of(fine) == "1 2 "
            status = await client.status()
            assert [row["state"] for row in status["models"]] == ["READY"]

    play(script)
