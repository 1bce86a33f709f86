"""How much memory a machine has for models, on machines that are played."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.supervisor.memory import machine
from mlxsup.supervisor.memory.machine import (
    NoDeviceMemoryError,
    control_group_limit,
    device_budget,
    find_budget,
    host_budget,
    largest_budget_bytes,
    mac_budget,
)

GIB = 2**30


@pytest.mark.parametrize(
    ("total", "group", "size", "reason"),
    [
        (64, None, 64 - 6.4, "64.00 GiB of RAM less a reserve of 6.40 GiB"),
        (16, None, 14, "16.00 GiB of RAM less a reserve of 2.00 GiB"),
        (3, None, 1.5, "3.00 GiB of RAM less a reserve of 1.50 GiB"),
        (64, 8, 6, "8.00 GiB of the control group less a reserve of 2.00 GiB"),
        (8, 64, 6, "8.00 GiB of RAM less a reserve of 2.00 GiB"),
    ],
)
def test_a_reserve_is_left_to_the_rest_of_the_machine(
    total: int, group: int | None, size: float, reason: str
) -> None:
    found = host_budget(total * GIB, None if group is None else group * GIB)
    assert found.size_bytes == pytest.approx(size * GIB, abs=1)
    assert (found.reason, found.automatic_bytes) == (reason, None)
    assert found.machine_bytes == min(total, group or total) * GIB


@pytest.mark.parametrize(
    ("total", "wired", "size", "reason"),
    [
        (16, 0, 16 * 2 / 3, "two thirds of 16.00 GiB, the recommended working set"),
        (32, 0, 32 * 2 / 3, "two thirds of 32.00 GiB, the recommended working set"),
        (64, 0, 48, "three quarters of 64.00 GiB, the recommended working set"),
        (64, 60, 60, "iogpu.wired_limit_mb of 64.00 GiB, the recommended working set"),
        (64, 99, 64, "iogpu.wired_limit_mb of 64.00 GiB, the recommended working set"),
    ],
)
def test_a_mac_recommends_a_working_set(total: int, wired: int, size: float, reason: str) -> None:
    found = mac_budget(total * GIB, wired * GIB)
    assert found.size_bytes == pytest.approx(size * GIB, abs=1)
    assert (found.machine_bytes, found.reason) == (total * GIB, reason)


def test_on_a_gpu_what_others_hold_is_not_there() -> None:
    found = device_budget(80 * GIB, 30 * GIB, own_bytes=20 * GIB)
    assert (found.size_bytes, found.machine_bytes) == (70 * GIB, 80 * GIB)
    assert found.reason == "80.00 GiB of GPU memory less 10.00 GiB that others hold"
    assert device_budget(80 * GIB, 30 * GIB, own_bytes=31 * GIB).size_bytes == 80 * GIB


# ---------------------------------------------------------------- control groups


def groups(tmp_path: Path, lines: str, limits: dict[str, str]) -> int | None:
    """The limit that a process with these lines in /proc/self/cgroup finds."""
    own = tmp_path / "cgroup"
    own.write_text(lines)
    root = tmp_path / "fs"
    for name, text in limits.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return control_group_limit(root, own)


V1 = "11:cpu,cpuacct:/box\n7:memory:/box/inner\n0::/box\n"


@pytest.mark.parametrize(
    ("lines", "limits", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "memory.max": "max\n"}, None),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a/b\n", {"a/b/memory.max": "1024\n", "a/memory.max": "4096\n"}, 1024),
        ("0::/a/b\n", {"a/b/memory.max": "4096\n", "a/memory.max": "1024\n"}, 1024),
        ("0::/host/path\n", {"memory.max": "2048\n"}, 2048),
        ("0::/\n", {}, None),
        (V1, {"memory/box/inner/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        (V1, {"memory/box/inner/memory.limit_in_bytes": "9223372036854771712\n",
              "memory/box/memory.limit_in_bytes": "8192\n"}, 8192),
        (V1, {"memory/memory.limit_in_bytes": "512\n"}, 512),
    ],
)  # fmt: skip
def test_the_smallest_limit_around_a_process_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    limits: dict[str, str],
    expected: int | None,
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert groups(tmp_path, lines, limits) == expected


def test_without_control_groups_there_is_no_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert control_group_limit(tmp_path, tmp_path / "none") is None
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    assert control_group_limit() is None


# ---------------------------------------------------------------- the whole


def play(
    monkeypatch: pytest.MonkeyPatch, *, total: int, answer: str | None = None
) -> list[tuple[str, ...]]:
    """A machine with so much RAM, whose programs give this answer; returns who was asked."""
    asked: list[tuple[str, ...]] = []

    def run(argv: tuple[str, ...], **_: object) -> Any:
        asked.append(argv)
        if answer is None:
            raise FileNotFoundError(argv[0])
        return SimpleNamespace(stdout=answer)

    monkeypatch.setattr(machine, "ram_bytes", lambda: total * GIB)
    monkeypatch.setattr(machine, "control_group_limit", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    return asked


@pytest.mark.parametrize("answer", [None, "", "N/A, N/A\n", "no devices\n"])
def test_a_gpu_that_says_nothing_needs_a_budget_of_the_user(
    monkeypatch: pytest.MonkeyPatch, answer: str | None
) -> None:
    play(monkeypatch, total=64, answer=answer)
    with pytest.raises(NoDeviceMemoryError, match="set memory_budget to a size"):
        find_budget(None, "cuda")
    assert find_budget(5 * GIB, "cuda").size_bytes == 5 * GIB


def test_a_given_budget_knows_what_the_automatic_one_would_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play(monkeypatch, total=64, answer="0\n")
    found = find_budget(5 * GIB, "metal")
    assert (found.size_bytes, found.machine_bytes) == (5 * GIB, 64 * GIB)
    assert found.automatic_bytes == 48 * GIB
    assert found.reason == "memory_budget"
    assert find_budget(80 * GIB, "cuda").machine_bytes == 80 * GIB, "a GPU may have more than RAM"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    """Puts a program where programs are found, instead of all others."""
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


SMI = "--query-gpu=memory.total,memory.used --format=csv,noheader,nounits --id=0"


def test_nvidia_smi_is_asked_about_the_first_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "nvidia-smi", f'[ "$*" = "{SMI}" ] && echo "81559, 523"')
    assert machine.read_device() == (81559 * 2**20, 523 * 2**20)
    assert find_budget(None, "cuda").size_bytes == (81559 - 523) * 2**20


@pytest.mark.parametrize(("ends", "gib"), [("", 60), ("; exit 1", 48)])
def test_sysctl_is_asked_about_the_wired_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str, gib: int
) -> None:
    monkeypatch.setattr(machine, "ram_bytes", lambda: 64 * GIB)
    script = f'[ "$*" = "-n iogpu.wired_limit_mb" ] && echo {60 * 1024}{ends}'
    install(tmp_path, monkeypatch, "sysctl", script)
    assert find_budget(None, "metal").size_bytes == gib * GIB


def test_the_largest_budget_is_what_the_machine_or_its_gpu_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = play(monkeypatch, total=64, answer="81920, 1024\n")
    assert largest_budget_bytes(64 * GIB, "cuda") == 64 * GIB
    assert find_budget(None, "cpu") == host_budget(64 * GIB, None)
    assert asked == []
    assert largest_budget_bytes(65 * GIB, "cuda") == 80 * GIB
    assert largest_budget_bytes(65 * GIB, "cpu") == 64 * GIB
    for answer in (None, "40960, 0\n"):
        play(monkeypatch, total=64, answer=answer)
        assert largest_budget_bytes(65 * GIB, "cuda") == 64 * GIB


@pytest.mark.parametrize(
    ("system", "processor", "installed", "expected"),
    [
        ("Darwin", "arm64", (), "metal"),
        ("Darwin", "x86_64", (), "cpu"),
        ("Linux", "x86_64", (), "cpu"),
        ("Linux", "x86_64", ("mlx-cpu", "mlx-cuda-13-tools"), "cpu"),
        ("Linux", "x86_64", ("mlx-cuda-13",), "cuda"),
        ("Linux", "aarch64", ("mlx-cuda-12",), "cuda"),
    ],
)
def test_the_backend_follows_from_the_system_and_what_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    system: str,
    processor: str,
    installed: tuple[str, ...],
    expected: str,
) -> None:
    for package in installed:
        (tmp_path / f"{package.replace('-', '_')}-0.32.2.dist-info").mkdir()
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: processor)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "nowhere"), str(tmp_path)])
    assert machine.find_backend() == expected
