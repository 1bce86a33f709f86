"""The checks of `doctor` on machines that are played: each defect has one finding."""

from __future__ import annotations

import errno
import getpass
import os
import platform
import plistlib
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from mlxsup.cli import port
from mlxsup.cli.commands import doctor as commands_doctor
from mlxsup.cli.commands import plan
from mlxsup.cli.doctor import installed, running
from mlxsup.cli.doctor.finding import Finding, Level, examine
from mlxsup.cli.doctor.installed import Setting
from mlxsup.cli.lock_holder import LockHolder
from mlxsup.cli.terminal.output import Output
from mlxsup.protocol.discovery import ConfigPlace
from mlxsup.protocol.gateway import Address
from mlxsup.protocol.key_file import KeyPlace
from mlxsup.protocol.version import VERSION
from mlxsup.supervisor.memory import estimator
from mlxsup.supervisor.memory import machine as machine_module
from mlxsup.supervisor.memory.machine import NoDeviceMemoryError

GIB = 2**30
PLAN = {"change": None, "models": [{"name": "m", "problem": "", "missing_bytes": 0}]}
STATUS: dict[str, Any] = {
    "version": VERSION, "pid": 7, "config_path": None,
    "models": [{"name": "m", "state": "READY"}],
}  # fmt: skip
HOLDER = LockHolder(pid=7, is_stopped=False, is_beating=False)


class Machine:
    """A sound Mac with a sound configuration, in which tests change one thing.

    Attributes:
        home: a folder.
        patch: changes a name of a module.
    """

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        self.home = home
        self.patch = patch.setattr
        (home / "run").mkdir(mode=0o700)
        (home / "mlxsup.toml").write_text("")
        config = ConfigPlace(home / "mlxsup.toml", "./mlxsup.toml", False)
        self.setting: dict[str, Any] = {
            "places": (config,), "counting": config, "config": config.path, "problems": (),
            "loaded": None, "endpoint": f"ipc://{home}/run/client.sock",
            "runtime_dir": home / "run", "log_dir": home / "logs", "listen": "", "key_need": "",
            "keys": KeyPlace.beside(config.path, home / "run"),
        }  # fmt: skip
        patch.setenv("HOME", str(home))
        patch.setenv("HF_HOME", str(home / "hub"))
        for name in ("HF_TOKEN", "XDG_CACHE_HOME", "MLXSUP_ENDPOINT", "HF_HUB_OFFLINE"):
            patch.setenv(name, "")  # or what a case sets would stay set
            patch.delenv(name)
        self.patch(platform, "system", lambda: "Darwin")
        self.patch(shutil, "which", lambda _: None)
        self.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=100 * GIB))
        self.patch(machine_module, "find_backend", lambda: "metal")
        self.patch(psutil, "disk_partitions", lambda **_: [])
        self.budget(48 * GIB)
        self.patch(running, "ask_status", lambda _: (None, ""))
        self.patch(running, "lock_holder", lambda _: None)

    def has(self, **changes: Any) -> None:
        self.setting |= changes

    def budget(self, size: int) -> None:
        found = SimpleNamespace(size_bytes=size, automatic_bytes=48 * GIB, reason="of 64.00 GiB")
        self.patch(machine_module, "command_budget", lambda *_: found)

    def plans(self, **changes: Any) -> None:
        self.has(loaded=SimpleNamespace(memory_budget=None, models=()))
        self.patch(plan, "plan_of", lambda _: PLAN | changes)
        self.patch(estimator, "check_memory", lambda _: None)

    def runs(self, **changes: Any) -> None:
        self.patch(running, "ask_status", lambda _: (STATUS | changes, ""))
        self.patch(running, "lock_holder", lambda _: HOLDER)

    def is_linux(self, *packages: str, has_gpu: bool = False) -> None:
        self.patch(platform, "system", lambda: "Linux")
        self.patch(machine_module, "find_backend", lambda: "cpu")
        self.patch(installed, "version_of", lambda name: "1" if name in packages else None)
        self.patch(installed, "_requirements", lambda: ["numpy"] if "numpy" in packages else [])
        self.patch(shutil, "which", lambda _: "/bin/nvidia-smi" if has_gpu else None)

    def needs(self, version: str | None) -> None:
        self.patch(installed, "_requirements", lambda: ["mlx<0.33,>=0.32.2"])
        self.patch(installed, "version_of", lambda _: version)

    def gateway(
        self,
        error: OSError | None,
        status: dict[str, Any] | None = None,
        *,
        key_need: str = "",
    ) -> None:
        self.has(listen="127.0.0.1:8484", key_need=key_need)
        taken = Address.parse("127.0.0.1:8484")
        self.patch(port, "refused_at", lambda one: error if one == taken else None)
        if status is not None:
            self.runs(gateway=status)

    def job(self, **changes: Any) -> None:
        """Install a job of launchd; None leaves a key out."""
        config = str(self.home / "mlxsup.toml")
        job = {"ProgramArguments": ["/bin/sh", "start", "--config", config]} | changes
        path = self.home / "Library/LaunchAgents/mlxsup.plist"
        path.parent.mkdir(parents=True)
        self.patch(shutil, "which", lambda _: "/bin/sh")
        path.write_bytes(plistlib.dumps({k: v for k, v in job.items() if v is not None}))

    def unit(self, command: str, *, lingers: bool = True) -> None:
        self.is_linux()
        path = self.home / ".config/systemd/user/mlxsup.service"
        path.parent.mkdir(parents=True)
        path.write_text(f"[Service]\nExecStart={command}\n")
        linger = self.home / "linger"
        linger.mkdir()
        if lingers:
            (linger / "me").touch()
        self.patch(running, "LINGERING", linger)
        self.patch(getpass, "getuser", lambda: "me")

    def findings(self) -> list[Finding]:
        setting = Setting(**self.setting)
        checks = (
            installed.check_software, installed.check_configuration, installed.check_models,
            installed.check_downloads, installed.check_folders,
            installed.check_memory, running.check_daemon, running.check_services,
        )  # fmt: skip
        return [one for check in checks for one in check(setting)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def raises(error: Exception) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def is_on_nfs(machine: Machine) -> None:
    part = SimpleNamespace(mountpoint="/", fstype="nfs4")
    machine.patch(psutil, "disk_partitions", lambda **_: [part])


def holds_a_file_of_another_program(machine: Machine) -> None:
    (machine.home / "run" / "music").touch()
    (machine.home / "run").chmod(0o755)


def has_a_shadowed_file(machine: Machine) -> None:
    (machine.home / "other.toml").touch()
    other = ConfigPlace(machine.home / "other.toml", "~/.config", False)
    machine.has(places=(*machine.setting["places"], other))


def lock_names(machine: Machine, pid: int) -> None:
    (machine.home / "run" / "lock").write_text(f"{pid} x\n")


def left_sockets(machine: Machine) -> None:
    lock_names(machine, 10**9)
    (machine.home / "run" / "client.sock").touch()


IN_USE = OSError(errno.EADDRINUSE, "in use")

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
        lambda m: m.has(counting=None), "note", "there is no configuration file", "mlxsup init"),
    "a named file is missing": (
        lambda m: (m.home / "mlxsup.toml").unlink(), "problem", "does not exist; ./mlxsup.toml",
        ""),
    "a wrong file": (
        lambda m: m.has(problems=("line 3: no such key",)), "problem", "line 3: no such key", ""),
    "a shadowed file": (has_a_shadowed_file, "note", "other.toml is ignored, because", ""),
    "a variable names the daemon": (
        lambda m: os.environ.update(MLXSUP_ENDPOINT="ipc:///x"), "note", "is set to ipc:///x",
        "unset MLXSUP_ENDPOINT"),
    "more than macOS recommends": (
        lambda m: m.budget(60 * GIB), "problem", "macOS recommends at most 48.00 GiB",
        "sudo sysctl iogpu.wired_limit_mb=61440"),
    "no device memory": (
        lambda m: m.patch(
            machine_module, "command_budget", raises(NoDeviceMemoryError("no answer"))),
        "problem", "no answer", ""),
    "not all models fit": (
        lambda m: m.plans(change="set context_length = 512 for a"), "note", "models with", ""),
    "a model fits nowhere": (
        lambda m: m.plans(models=[{"name": "m", "problem": "", "missing_bytes": 1}]),
        "problem", "m does not fit into 48.00 GiB", ""),
    "a network disk": (is_on_nfs, "problem", "is on a network disk (nfs4)", ""),
    "a disk that is read-only": (
        lambda m: m.patch(tempfile, "TemporaryFile", raises(OSError(30, "Read-only file"))),
        "problem", ": Read-only file", ""),
    "another user's folder": (
        lambda m: m.patch(os, "geteuid", lambda: -2), "problem", "belongs to another user", ""),
    "a folder that others use, too": (
        holds_a_file_of_another_program, "problem", "has mode 0755", ""),
    "a folder whose sockets no system can bind": (
        lambda m: m.has(runtime_dir=Path("/tmp", "x" * 90)), "problem", "path is too long", ""),
    "a folder that is a file": (
        lambda m: m.has(runtime_dir=Path("/dev/null")), "problem", "is not a folder", ""),
    "little room": (
        lambda m: m.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * GIB)),
        "note", "has 2.00 GiB left", ""),
    "no room": (
        lambda m: m.patch(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB // 8)),
        "problem", " MiB left", ""),
    "another version runs": (
        lambda m: m.runs(version="0.0.9"), "problem", "the daemon has version 0.0.9", ""),
    "another configuration runs": (
        lambda m: m.runs(config_path="/h/other.toml"), "note", "the daemon uses /h/other.toml", ""),
    "a model has failed": (
        lambda m: m.runs(models=[{"name": "m", "state": "FAILED", "cause": "no file"}]),
        "problem", "m has FAILED: no file", ""),
    "a silent daemon": (
        lambda m: m.patch(running, "lock_holder", lambda _: HOLDER), "problem",
        "process 7 of the daemon is alive but does not answer at ipc://", ""),
    "a daemon is stopped": (
        lambda m: m.patch(running, "lock_holder", lambda _: replace(HOLDER, is_stopped=True)),
        "problem", "is stopped by Ctrl-Z", "kill -CONT 7"),
    "the pid of a daemon is another program's": (
        lambda m: lock_names(m, os.getpid()), "note", "which is now another program", "mlxsup st"),
    "a daemon was killed": (left_sockets, "note", "was killed and left its socket", "mlxsup st"),
    "no such address": (
        lambda m: m.gateway(OSError(99, "Cannot assign")), "problem",
        "127.0.0.1:8484 cannot be used: Cannot assign", ""),
    "a taken port": (
        lambda m: m.gateway(IN_USE), "problem", "127.0.0.1:8484 is taken", ""),
    "no key": (
        lambda m: m.gateway(None, key_need="gateway.keys asks for them"), "problem",
        "gateway.keys asks for them, but there is no API key", "mlxsup key new laptop"),
    "a job without a program": (
        lambda m: m.job(ProgramArguments=None), "problem", "names no program to start", ""),
    "a job of a program that is gone": (
        lambda m: m.job(ProgramArguments=["/none/mlxsup"]), "problem", "which does not exist", ""),
    "a job with a file that is gone": (
        lambda m: m.job(ProgramArguments=["/bin/sh", "--config=/none"]), "problem",
        "names /none, which does not exist", ""),
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
    pytest.param(lambda m: m.gateway(None), id="with a gateway to come"),
    pytest.param(lambda m: m.gateway(IN_USE, {"address": "127.0.0.1:8484"}), id="and its own"),
    pytest.param(lambda m: m.job(), id="with a job"),
    pytest.param(lambda m: m.plans(), id="with models that fit"),
    pytest.param(lambda m: m.has(places=m.setting["places"] * 2), id="with a file named twice"),
])  # fmt: skip
def test_what_is_in_order_is_said_to_be(
    machine: Machine, plant: Callable[[Machine], object]
) -> None:
    plant(machine)
    found = machine.findings()
    assert {one.level for one in found} == {Level.OK}, found
    assert not any(one.why or one.fix or one.command for one in found)


@pytest.mark.parametrize(
    ("lingers", "command", "words"),
    [
        (True, "/bin/sh start --config {config}", "starts /bin/sh"),
        (True, "-@/bin/sh start --config {config}", "starts /bin/sh"),
        (True, "%h/mlxsup start", "starts {home}/mlxsup, which does not exist"),
        (True, "", "names no program to start"),
        (True, '"', "names no program to start"),
        (False, "/bin/sh start", "runs only while you are logged in"),
    ],
)
def test_what_is_said_of_a_unit_of_systemd(
    machine: Machine, lingers: bool, command: str, words: str
) -> None:
    config = machine.home / "mlxsup.toml"
    machine.unit(command.format(config=config), lingers=lingers)
    [finding] = running.check_services(Setting(**machine.setting))
    assert words.format(home=machine.home) in finding.what


def test_a_check_that_cannot_run_says_so_and_hides_no_other() -> None:
    hangs, slow = threading.Event(), list[Any]()

    def waits() -> Iterator[Finding]:
        hangs.wait(60.0)
        yield from ()

    checks: dict[str, Callable[[], Any]] = {
        "disk": waits,
        "files": raises(PermissionError(13, "Permission denied", "/x")),
        "bug": raises(KeyError("models")),
        "fine": lambda: [Finding("fine", "is fine", level=Level.OK)],
    }
    try:
        found = list(examine(checks, on_slow=slow.append, limit_s=0.2))
    finally:
        hangs.set()
    assert slow == [["disk"]]
    assert [(one.subject, one.level) for one in found] == [
        ("disk", "note"), ("files", "note"), ("bug", "problem"), ("fine", "ok"),
    ]  # fmt: skip
    assert "could not be checked within" in found[0].what
    assert "Permission denied" in found[1].what
    assert "KeyError" in found[2].what
    assert all("could not run" in one.why for one in found[1:3])


def test_only_the_mode_of_a_key_file_is_repaired_by_its_command(machine: Machine) -> None:
    file = machine.setting["keys"].file
    file.write_text("no keys")
    file.chmod(0o640)
    [finding] = [one for one in machine.findings() if one.subject == "API keys"]
    assert finding.command == f"chmod 600 {file}"
    file.chmod(0o600)
    [finding] = [one for one in machine.findings() if one.subject == "API keys"]
    assert (finding.command, "mlxsup key new" in finding.fix) == ("", True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_long_path_is_never_torn_apart_by_a_space() -> None:
    path = "/a" * 30
    found = Finding("daemon", f"another one runs at {path} (pid 9)", level=Level.NOTE)
    lines = commands_doctor.lines_of(found, 40, Output())
    assert lines[0].startswith("note     daemon: another one")
    assert path in "".join(line.strip() for line in lines)
    assert max(map(len, lines)) <= 40
