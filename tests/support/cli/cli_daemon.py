"""The command line against a scripted supervisor that answers every command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mlxsup.protocol.client_messages import (
    Cancel,
    Generate,
    Load,
    Restart,
    StatusQuery,
    Stop,
)
from mlxsup.protocol.message import Message
from mlxsup.protocol.version import VERSION

from support.client.scripted_supervisor import (
    Peer,
    ScriptedSupervisor,
    answer,
    fail,
    finish,
    send_pieces,
)
from support.daemon import warm

TIME_LIMIT_S = 120


def model(name: str, **values: Any) -> dict[str, Any]:
    return {
        "name": name,
        "state": "READY",
        "generation": 1,
        "pid": 4711,
        "restarts": 0,
        "last_exit": None,
        "retry_in_s": None,
        "progress": None,
        "queued": 0,
        "running": [],
        "tokens_per_s": 0.0,
        "footprint_bytes": 3 * 2**30,
        "context_length": 8192,
        "loaded_for_s": 125.0,
        **values,
    }


class Daemon:
    """A script that answers every command of the command line."""

    def __init__(self, log_dir: Path) -> None:
        self.models = [
            model("smollm2"),
            model(
                "qwen",
                state="FAILED",
                pid=None,
                last_exit={"reason": "load_error", "code": 66, "signal": None, "detail": "no /q"},
            ),
        ]
        self.log_dir = log_dir
        self.stopping: list[subprocess.Popen[bytes]] = []

    def __call__(self, peer: Peer, message: Message) -> None:
        match message:
            case StatusQuery():
                answer(
                    peer, message, version=VERSION, models=self.models, log_dir=str(self.log_dir)
                )
            case Load(model="smolm2") | Generate(model="smolm2"):
                known = [entry["name"] for entry in self.models]
                sentence = "no model is called 'smolm2'; configured: qwen, smollm2"
                values = {"known": known, "close": ["smollm2"]}
                fail(peer, message.id, "unknown_model", sentence, **values)
            case Load(model="qwen"):
                fail(peer, message.id, "load_failed", "qwen: no folder /q", model="qwen")
            case Generate(model="qwen"):
                send_pieces(peer, message.id, ["one", " two"])
                fail(peer, message.id, "worker_crashed", "its worker crashed", tokens_sent=2)
            case Generate():
                send_pieces(peer, message.id, ["Hällo", " wörld"])
                finish(peer, message.id, 2)
            case Restart(now=False):
                pass
            case Stop():
                for process in self.stopping:
                    process.terminate()
                pids = [process.pid for process in self.stopping]
                answer(peer, message, pids=pids[1:], supervisor_pid=pids[0])
            case Cancel():
                pass
            case _:
                answer(peer, message)


def environment(**values: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MLXSUP") and k != "NO_COLOR"}
    return kept | {"PYTHONUNBUFFERED": ""} | values


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "mlxsup.cli", *arguments]


def mlxsup(
    *arguments: str, stdin: bytes = b"", **variables: str
) -> subprocess.CompletedProcess[str]:
    done = warm.run(
        command(*arguments),
        stdin=stdin,
        environment=environment(**variables),
        timeout_s=TIME_LIMIT_S,
    )
    out, err = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in err
    assert "\x1b" not in out + err
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def at(supervisor: ScriptedSupervisor, *arguments: str, **keywords: Any) -> Any:
    return mlxsup(*arguments, "--endpoint", supervisor.endpoint, **keywords)
