"""The checks of `doctor` on machines that are played: each defect has one finding."""

from __future__ import annotations

import os
import platform
import plistlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.cli import service
from mlxsup.cli.commands import doctor, plan
from mlxsup.cli.commands.doctor import Finding, Level, Setting, examine, lines_of
from mlxsup.cli.connection import Target
from mlxsup.cli.exit_status import CliError, ExitStatus
from mlxsup.cli.service import Launchd
from mlxsup.cli.terminal.output import Output
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.supervisor.memory import machine as machine_module
from mlxsup.supervisor.memory.machine import NoDeviceMemoryError

GIB = 2**30
STATUS: dict[str, Any] = {
    "pid": 7, "config_path": None, "models": [{"name": "m", "state": "READY"}], "gateway": None,
}  # fmt: skip
SILENT = CliError("it is stopped", hint="`kill -CONT 7`", status=ExitStatus.NO_DAEMON)


class Machine:
    """A sound Mac with a sound configuration, in which tests change one thing.

    Attributes:
        home: a folder.
        patch: changes a name of a module.
        managers: of services: the user's, and that of the machine.
    """

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.patch = patch.setattr
        (home / "run").mkdir(mode=0o700)
        (home / "mlxsup.toml").write_text("")
        self.keys = KeyPlace.beside(home / "mlxsup.toml", home / "run")
        loaded: Any = SimpleNamespace(memory_budget=None, models=(), keys=self.keys)
        self.setting: dict[str, Any] = {
            "config": home / "mlxsup.toml", "loaded": loaded, "problems": (), "target": Target(),
            "endpoint": f"ipc://{home}/run/client.sock", "runtime_dir": home / "run",
            "log_dir": home / "logs",
        }  # fmt: skip
        folders = {False: home, True: home / "machine"}
        self.managers = {key: Launchd(one, is_system=False) for key, one in folders.items()}
        self.patch(service, "manager_here", lambda _, is_system: self.managers[is_system])
        patch.setenv("HOME", str(home))
        patch.setenv("HF_HOME", str(home / "hub"))
        self.patch(platform, "system", lambda: "Darwin")
        self.patch(sys, "platform", "darwin")
        self.patch(shutil, "which", lambda _: None)
        self.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * GIB))
        self.patch(machine_module, "find_backend", lambda: "metal")
        self.budget(48 * GIB)
        self.plans(None)
        self.patch(doctor, "status_of_daemon", lambda _: None)

    def has(self, **changes: Any) -> None:
        self.setting |= changes

    def budget(self, size: int) -> None:
        found = SimpleNamespace(size_bytes=size, automatic_bytes=48 * GIB, reason="of 64.00 GiB")
        self.patch(machine_module, "command_budget", lambda *_: found)

    def plans(self, change: str | None) -> None:
        self.patch(plan, "plan_of", lambda _: {"change": change})

    def runs(self, **changes: Any) -> None:
        self.patch(doctor, "status_of_daemon", lambda _: STATUS | changes)

    def is_linux(self, *packages: str, has_gpu: bool = False) -> None:
        self.patch(platform, "system", lambda: "Linux")
        self.patch(machine_module, "find_backend", lambda: "cpu")
        self.patch(doctor, "version_of", lambda name: "1" if name in packages else None)
        self.patch(doctor, "requirements", lambda: ["numpy"] if "numpy" in packages else [])
        self.patch(shutil, "which", lambda _: "/bin/nvidia-smi" if has_gpu else None)

    def needs(self, version: str | None) -> None:
        self.patch(doctor, "requirements", lambda: ["mlx<0.33,>=0.32.2"])
        self.patch(doctor, "version_of", lambda _: version)

    def job(self, *words: str, is_system: bool = False) -> None:
        """Install a job of launchd that starts this."""
        path = self.managers[is_system].path
        path.parent.mkdir(parents=True)
        path.write_bytes(plistlib.dumps({"ProgramArguments": list(words)}))

    def findings(self) -> list[Finding]:
        return list(examine(Setting(**self.setting)))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def lost_its_keys(machine: Machine) -> None:
    machine.keys.file.write_text("no keys")
    machine.keys.file.chmod(0o600)


def holds_a_file_of_another_program(machine: Machine) -> None:
    (machine.home / "run" / "music").touch()
    (machine.home / "run").chmod(0o755)


DEFECTS: dict[str, tuple[Callable[[Machine], object], str, str, str]] = {
    "no back-end": (
        lambda m: m.is_linux("numpy"), "problem", "MLX has no back-end", "'mlxsup[cpu]'"),
    "no back-end next to a GPU": (
        lambda m: m.is_linux("numpy", has_gpu=True), "problem", "no back-end", "'mlxsup[cuda]'"),
    "an idle GPU": (
        lambda m: m.is_linux("numpy", "mlx-cpu", has_gpu=True), "note", "has an NVIDIA GPU",
        "'mlxsup[cuda]'"),
    "a package is gone": (
        lambda m: m.needs(None), "problem", "mlx is not installed", "'mlx<0.33,>=0.32.2'"),
    "a package of another version": (
        lambda m: m.needs("0.31.0"), "problem", "mlx is 0.31.0; mlxsup needs mlx", "'mlx<"),
    "no configuration": (
        lambda m: m.has(config=None, loaded=None), "note", "no configuration file", "mlxsup init"),
    "a wrong file": (
        lambda m: m.has(problems=("line 3: no such key",)), "problem", "line 3: no such key", ""),
    "lost keys": (lost_its_keys, "problem", "keys.json", ""),
    "more than macOS recommends": (
        lambda m: m.budget(60 * GIB), "problem", "macOS recommends at most 48.00 GiB",
        "sudo sysctl iogpu.wired_limit_mb=61440"),
    "no device memory": (
        lambda m: m.patch(
            machine_module, "command_budget", raises(NoDeviceMemoryError("no answer"))),
        "problem", "no answer", ""),
    "not all models fit": (
        lambda m: m.plans("set context_length = 512 for a"), "note", "do not all fit into 48", ""),
    "another user's folder": (
        lambda m: m.patch(os, "geteuid", lambda: -2), "problem", "belongs to another user", ""),
    "a folder that others use, too": (
        holds_a_file_of_another_program, "problem", "has mode 0755", ""),
    "little room": (
        lambda m: m.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * GIB)),
        "note", "has 2.00 GiB left", ""),
    "no room": (
        lambda m: m.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB // 8)),
        "problem", " MiB left", ""),
    "no room in the runtime folder": (
        lambda m: m.patch(shutil, "disk_usage", lambda path: SimpleNamespace(
            free=2**19 if path == m.home / "run" else 100 * GIB)),
        "problem", "/run has ", ""),
    "no room for a file": (
        lambda m: m.patch(os, "statvfs", lambda _: SimpleNamespace(f_files=9, f_favail=0)),
        "problem", "has no room for one more file", ""),
    "a disk that is read-only": (
        lambda m: m.patch(os, "access", lambda *_: False), "problem", "cannot be written", ""),
    "a disk that does not answer": (
        lambda m: m.patch(shutil, "disk_usage", raises(OSError(5, "Input/output error"))),
        "note", "could not be checked", ""),
    "another configuration runs": (
        lambda m: m.runs(config_path="/h/other.toml"), "note", "the daemon uses /h/other.toml", ""),
    "a model has failed": (
        lambda m: m.runs(models=[{"name": "m", "state": "FAILED"}]), "problem", "m has FAILED", ""),
    "a silent daemon": (
        lambda m: m.patch(doctor, "status_of_daemon", raises(SILENT)), "problem", "stopped", ""),
    "a job without a program": (lambda m: m.job(), "problem", "starts no program", "install"),
    "a job of a program that is gone": (
        lambda m: m.job("/none/mlxsup"), "problem", "/none/mlxsup, which does", "install"),
    "a job with a file that is gone": (
        lambda m: m.job("/bin/sh", "--config", "/none"), "problem", "names /none, w", "install"),
    "a job of the machine without a program": (
        lambda m: m.job(is_system=True), "problem", "starts no program", "install --system"),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_named_with_why_and_what_to_do(machine: Machine, name: str) -> None:
    plant, level, words, command = DEFECTS[name]
    plant(machine)
    wrong = [one for one in machine.findings() if one.level is not Level.OK]
    assert {(one.level, words in one.what) for one in wrong} == {(level, True)}, wrong
    for one in wrong:
        assert one.why
        assert command in one.command
        assert bool(command) == bool(one.command)
        assert one.command or one.fix


@pytest.mark.parametrize("plant", [
    pytest.param(lambda m: None, id="a Mac"),
    pytest.param(lambda m: m.runs(), id="with a daemon"),
    pytest.param(lambda m: m.job("/bin/sh", "--config", str(m.home)), id="with a job"),
    pytest.param(lambda m: m.patch(os, "statvfs", lambda _: SimpleNamespace(f_files=0, f_favail=0)),
                 id="a disk that counts no files"),
    pytest.param(lambda m: (m.patch(machine_module, "find_backend", lambda: "cpu"),
                            m.budget(60 * GIB)), id="a large budget for the CPU"),
])  # fmt: skip
def test_what_is_in_order_is_said_to_be(
    machine: Machine, plant: Callable[[Machine], object]
) -> None:
    plant(machine)
    found = machine.findings()
    assert {one.level for one in found} == {Level.OK}, found
    assert [one.subject for one in found][:2] == ["software", "configuration"]
    assert not any(one.why or one.fix or one.command for one in found)


def test_a_file_that_is_not_there_is_to_be_made_and_another_one_to_be_corrected(
    machine: Machine,
) -> None:
    for path, fix in ((machine.home, "correct that line"), (Path("/none"), "`mlxsup init /none`")):
        machine.has(config=path, loaded=None, problems=("it is wrong",))
        [found] = [one for one in machine.findings() if one.level is Level.PROBLEM]
        assert fix in found.fix


def test_every_command_of_a_finding_has_the_options_that_were_given() -> None:
    found = Finding("x", "`mlxsup status`", level=Level.NOTE, fix="`mlxsup stop`")
    shown = doctor._with_options(
        replace(found, command="mlxsup reload"), Target(endpoint="ipc:///x")
    )
    assert (shown.what, shown.fix, shown.command) == (
        "`mlxsup status --endpoint ipc:///x`",
        "`mlxsup stop --endpoint ipc:///x`",
        "mlxsup reload --endpoint ipc:///x",
    )


def test_a_long_path_is_never_torn_apart_by_a_space() -> None:
    path = "/a" * 30
    found = Finding("daemon", f"another one runs at {path} (pid 9)", level=Level.NOTE)
    lines = lines_of(found, 40, Output())
    assert lines[0].startswith("note     daemon: another one")
    assert path in "".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 40
