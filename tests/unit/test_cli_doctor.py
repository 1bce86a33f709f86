"""The checks of `doctor`: each defect has one finding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.doctor.checks.configuration import check_configuration, check_hub
from mlxsup.cli.doctor.checks.daemon import check_daemon
from mlxsup.cli.doctor.checks.gateway import check_gateway
from mlxsup.cli.doctor.checks.machine import check_machine
from mlxsup.cli.doctor.checks.memory import check_memory
from mlxsup.cli.doctor.checks.places import check_open_files, check_places
from mlxsup.cli.doctor.checks.service import check_services
from mlxsup.cli.doctor.checks.software import check_software
from mlxsup.cli.doctor.facts import (
    ConfigFile,
    Configuration,
    DaemonFacts,
    Folder,
    GatewayFacts,
    Hub,
    Machine,
    Memory,
    OpenFiles,
    Package,
    Places,
    Server,
    Service,
    Software,
)
from mlxsup.cli.doctor.finding import Finding, Level

GIB = 2**30

MLX = Package(name="mlx", version="0.32.4", needed="<0.33,>=0.32.2", is_right=True)
SOFTWARE = Software(
    version="0.1.0", python="3.12.1", packages=(MLX,), installer="pip install", system="Linux",
    backend="cpu", has_backend=True, has_gpu=False,
)  # fmt: skip
MEMORY = Memory(
    backend="metal", total_bytes=64 * GIB, available_bytes=40 * GIB, swap_used_bytes=0,
    budget_bytes=48 * GIB, automatic_bytes=48 * GIB, reason="three quarters", change="",
    too_large=(), servers=(),
)  # fmt: skip
FOLDER = Folder(
    path=Path("/h/run"), is_there=True, is_folder=True, owner=501, mode=0o700,
    is_private_use=True, file_system="apfs", free_bytes=100 * GIB, refusal="",
)  # fmt: skip
PLACES = Places(
    user=501, runtime=FOLDER, logs=FOLDER, cache=FOLDER, too_long="", key_trouble="",
    key_path=Path("/h/run/keys.json"), is_key_file_open=False,
)  # fmt: skip
DAEMON = DaemonFacts(
    endpoint="ipc:///h/run/client.sock", version="0.1.0", config=Path("/h/mlxsup.toml"),
    holder=None, is_stopped=False, is_beating=False,
    recorded=None, recorded_name="", leftovers=0, status=None,
    failure="", others=(),
)  # fmt: skip
STATUS: dict[str, Any] = {"version": "0.1.0", "pid": 7, "config_path": None, "models": []}
GATEWAY = GatewayFacts(
    address="127.0.0.1:8484", missing=(), installer="pip install", key_need="",
    is_ours=False, refusal="", taken_by="", free_address="",
)  # fmt: skip
MAC = Machine(
    system="Darwin", sleep_minutes=0, now_s=2e9, written_s=1.9e9, written_path=Path("/h/a")
)


def runtime(**changes: Any) -> Places:
    return replace(PLACES, runtime=replace(FOLDER, **changes))


CASES: list[tuple[str, list[Finding], Level, str, str]] = [
    ("no back-end", [*check_software(replace(SOFTWARE, has_backend=False))],
     Level.PROBLEM, "MLX has no back-end", "pip install 'mlxsup[cpu]'"),
    ("no back-end next to a GPU",
     [*check_software(replace(SOFTWARE, has_backend=False, has_gpu=True))],
     Level.PROBLEM, "MLX has no back-end", "pip install 'mlxsup[cuda]'"),
    ("an idle GPU", [*check_software(replace(SOFTWARE, has_gpu=True))],
     Level.NOTE, "has an NVIDIA GPU", "pip install 'mlxsup[cuda]'"),
    ("not installed", [*check_software(replace(SOFTWARE, packages=()))],
     Level.NOTE, "not installed as a package", ""),
    ("a package is gone",
     [*check_software(replace(SOFTWARE, packages=(replace(MLX, version=None, is_right=False),)))],
     Level.PROBLEM, "mlx is not installed", "pip install 'mlx<0.33,>=0.32.2'"),
    ("more than macOS recommends", [*check_memory(replace(MEMORY, budget_bytes=60 * GIB))],
     Level.PROBLEM, "macOS recommends at most 48.00 GiB", "sudo sysctl iogpu.wired_limit_mb=61440"),
    ("no device memory", [*check_memory(replace(MEMORY, budget_bytes=None, reason="no answer"))],
     Level.PROBLEM, "no answer", ""),
    ("not all fit", [*check_memory(replace(MEMORY, change="set context_length = 512 for a"))],
     Level.NOTE, "not all models", ""),
    ("another server",
     [*check_memory(replace(MEMORY, servers=(Server(pid=9, name="ollama", size_bytes=GIB),)))],
     Level.NOTE, "ollama (pid 9) holds 1.00 GiB", ""),
    ("memory is short", [*check_memory(replace(MEMORY, available_bytes=GIB))],
     Level.NOTE, "only 1.00 GiB of 64.00 GiB", ""),
    ("a network disk", [*check_places(runtime(file_system="nfs4"))],
     Level.PROBLEM, "is on a network disk (nfs4)", ""),
    ("a folder on a disk that is read-only", [*check_places(runtime(refusal="Read-only file"))],
     Level.PROBLEM, "cannot be used: Read-only file", ""),
    ("another user's folder", [*check_places(runtime(owner=0))],
     Level.PROBLEM, "belongs to another user (uid 0)", ""),
    ("a folder that others use, too", [*check_places(runtime(mode=0o755, is_private_use=False))],
     Level.PROBLEM, "has mode 0755", ""),
    ("little room",
     [*check_places(replace(PLACES, cache=replace(FOLDER, free_bytes=2 * GIB)))],
     Level.NOTE, "has 2.00 GiB left", ""),
    ("few files on a Mac", [*check_open_files(OpenFiles(system="Darwin", hard=256, needed=2244))],
     Level.PROBLEM, "only 256 files", "sudo launchctl limit maxfiles 2244 2244"),
    ("another version runs", [*check_daemon(replace(DAEMON, holder=7, status=STATUS | {
        "version": "0.0.9"}))], Level.PROBLEM, "of version 0.0.9", ""),
    ("another configuration runs", [*check_daemon(replace(DAEMON, holder=7, status=STATUS | {
        "config_path": "/h/other.toml"}))], Level.NOTE, "it runs with /h/other.toml", ""),
    ("a silent daemon", [*check_daemon(replace(DAEMON, holder=7))],
     Level.PROBLEM, "does not answer at ipc:///h/run/client.sock", ""),
    ("no such address", [*check_gateway(replace(GATEWAY, refusal="Cannot assign"))],
     Level.PROBLEM, "cannot be used: Cannot assign", ""),
    ("a token that its group can read", [*check_hub(Hub(
        offline="", missing=(), token="a file", token_path=Path("/h/token"), token_mode=0o640))],
     Level.NOTE, "others may read the token", "chmod 600 /h/token"),
    ("sleep", [*check_machine(replace(MAC, sleep_minutes=10))],
     Level.NOTE, "sleeps after 10 minutes", "sudo pmset -c sleep 0"),
    ("the clock of a Mac", [*check_machine(replace(MAC, now_s=0.0))],
     Level.PROBLEM, "it is 1970-01-01", "sudo systemsetup -setusingnetworktime on"),
]  # fmt: skip


@pytest.mark.parametrize(("found", "level", "words", "command"), [
    pytest.param(*case[1:], id=case[0]) for case in CASES
])  # fmt: skip
def test_a_defect_is_named_with_why_and_what_to_do(
    found: list[Finding], level: Level, words: str, command: str
) -> None:
    wrong = [one for one in found if one.level is not Level.OK]
    assert [(one.level, words in one.what) for one in wrong] == [(level, True)], wrong
    [one] = wrong
    assert one.why
    assert one.command == command
    assert one.command or one.fix


def test_what_is_in_order_is_said_to_be() -> None:
    found = [
        *check_software(SOFTWARE), *check_memory(MEMORY), *check_places(PLACES),
        *check_open_files(OpenFiles(system="Darwin", hard=None, needed=2244)),
        *check_daemon(DAEMON), *check_daemon(replace(DAEMON, holder=7, status=STATUS)),
        *check_gateway(GATEWAY), *check_gateway(replace(GATEWAY, is_ours=True, refusal="in use")),
        *check_machine(MAC),
    ]  # fmt: skip
    assert {one.level for one in found} == {Level.OK}
    assert not any(one.why or one.fix or one.command for one in found)


def test_without_a_gateway_nothing_is_said_of_it() -> None:
    assert [*check_gateway(replace(GATEWAY, address="", missing=("uvicorn",)))] == []


def test_one_file_that_is_named_twice_shadows_nothing() -> None:
    path = Path("/h/mlxsup.toml")
    places = tuple(
        ConfigFile(path=path, source=source, is_named=True, is_there=True) for source in ("a", "b")
    )
    facts = Configuration(looked_at=places, endpoint_variable="", problems=(), models=1)
    assert [one.level for one in check_configuration(facts)] == [Level.OK]


SOUND = Service(
    path=Path("/u"), manager="systemd", program="/a/mlxsup", has_program=True,
    is_own_program=True, config=Path("/c"), has_config=True, lingers=True,
)  # fmt: skip


def changed(**values: Any) -> Service:
    return replace(SOUND, **values)


@pytest.mark.parametrize(
    ("service", "level", "words"),
    [
        (SOUND, Level.OK, "/u starts /a/mlxsup"),
        (changed(has_program=False), Level.PROBLEM, "which is not there"),
        (changed(is_own_program=False), Level.NOTE, "another mlxsup"),
        (changed(has_config=False), Level.PROBLEM, "names /c, which does not exist"),
        (changed(config=Path("/d")), Level.NOTE, "names /d, and commands here read /c"),
        (changed(lingers=False), Level.NOTE, "only while you are logged in"),
        (changed(manager="launchd", is_interactive=False), Level.NOTE, "ProcessType"),
    ],
)
def test_what_is_said_of_a_service(service: Service, level: Level, words: str) -> None:
    [finding] = check_services([service], Path("/c"))
    assert finding.level is level
    assert words in finding.what
    assert level is Level.OK or finding.fix or finding.command
