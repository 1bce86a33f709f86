"""What the doctor finds out about this machine: the gateway, other servers, and the hub's token."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.doctor.checks.configuration import check_hub
from mlxsup.cli.doctor.facts import Configuration, DaemonFacts, Hub
from mlxsup.cli.doctor.finding import Level
from mlxsup.cli.doctor.gathering.daemons import gather_gateway
from mlxsup.cli.doctor.gathering.machine import LARGE_BYTES, gather_memory
from mlxsup.cli.doctor.gathering.setting import Setting, gather_hub
from mlxsup.protocol.download import Repository

from support.key_place import place_in

SERVER = "import sys; held = bytearray(int(sys.argv[2])); print('ready', flush=True); input()"
"""Holds as much memory as its second argument says; its name is the first."""


def setting(folder: Path, listen: str = "") -> Setting:
    """One without a configuration, and with a gateway if `listen` says where."""
    nothing = Configuration(looked_at=(), endpoint_variable="", problems=(), models=0)
    return Setting(
        endpoint=f"ipc://{folder}/run/client.sock", configuration=nothing, loaded=None,
        runtime_dir=folder / "run", log_dir=folder / "logs", listen=listen, key_need="",
        keys=place_in(folder),
    )  # fmt: skip


def daemon(status: Mapping[str, Any] | None) -> DaemonFacts:
    """One that says this of itself; nobody holds its runtime folder, so no child listens for it."""
    return DaemonFacts(
        endpoint="ipc:///run/client.sock", version="0.1.0", config=None, holder=None,
        is_stopped=False, is_beating=False,
        recorded=None, recorded_name="", leftovers=0, status=status, failure="",
        others=(),
    )  # fmt: skip


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which this process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_an_address_is_taken_by_somebody_else_and_another_one_is_free(
    tmp_path: Path, taken: str
) -> None:
    for status in (None, {"gateway": None}, {"gateway": {"address": "127.0.0.1:1"}}):
        facts = gather_gateway(setting(tmp_path, taken), daemon(status))
        assert (facts.address, facts.is_ours) == (taken, False)
        assert facts.refusal == os.strerror(errno.EADDRINUSE)
        if sys.platform == "linux":  # a Mac says so to root alone
            assert f"(pid {os.getpid()})" in facts.taken_by
        assert facts.free_address not in ("", taken)


def test_the_address_of_our_own_gateway_is_not_taken(tmp_path: Path, taken: str) -> None:
    status = {"gateway": {"address": taken}}
    facts = gather_gateway(setting(tmp_path, taken), daemon(status))
    assert (facts.is_ours, facts.refusal, facts.taken_by) == (True, "", "")


@contextmanager
def server(name: str, size_bytes: int) -> Iterator[int]:
    """Another program that holds so much memory; its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, name, str(size_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()


def test_another_server_counts_once_it_holds_a_model(tmp_path: Path) -> None:
    with (
        server("/opt/bin/ollama", LARGE_BYTES + 2**20) as large,
        server("ollama", 2**20) as small,
        server("unknown-program", LARGE_BYTES + 2**20) as strange,
    ):
        found = {one.pid: one for one in gather_memory(setting(tmp_path)).servers}
    assert found[large].name == "ollama"
    assert found[large].size_bytes > LARGE_BYTES
    assert not {small, strange} & set(found)


@pytest.mark.parametrize("variable", ["HF_TOKEN_PATH", "HF_HOME", "XDG_CACHE_HOME"])
def test_the_token_is_where_huggingface_hub_looks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    names = {"HF_TOKEN_PATH": "mine", "HF_HOME": "token", "XDG_CACHE_HOME": "huggingface/token"}
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", *names):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    token = tmp_path / names[variable]
    token.parent.mkdir(exist_ok=True)
    token.write_text("hf_SECRET")
    token.chmod(0o640)
    monkeypatch.setenv(variable, str(token if variable == "HF_TOKEN_PATH" else tmp_path))
    facts = gather_hub(setting(tmp_path))
    assert (facts.token, facts.token_path, facts.token_mode) == (str(token), token, 0o640)
    [found] = check_hub(facts)
    assert (found.level, found.command) == (Level.NOTE, f"chmod 600 {token}")


@pytest.mark.parametrize("offline", ["", "HF_HUB_OFFLINE"])
def test_a_pull_names_the_revision_that_is_configured(offline: str) -> None:
    missing = (("a", Repository("org/a")), ("b", Repository("org/b", revision="v2")))
    facts = Hub(offline=offline, missing=missing, token="", token_path=None, token_mode=None)
    commands = [one.command for one in check_hub(facts)]
    assert [command[command.index("mlxsup") :] for command in commands] == [
        "mlxsup pull org/a",
        "mlxsup pull org/b --revision v2",
    ]
    assert all(command.startswith("env -u") == bool(offline) for command in commands)
