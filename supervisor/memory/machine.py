"""How much memory the machine has for models, and how much of it they may take.

On CUDA the figure is nvidia-smi's, because the supervisor must not import MLX. The reserve is at
most half, or a small machine would have no budget at all.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from mlxsup.protocol.text import size_text

from ..core.budget import Budget

CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda")

_FOLDER = re.compile(rf"({'|'.join(CUDA_PACKAGES).replace('-', '_')})-[^-]+\.dist-info")
"""The name that an installed one of them has next to its modules."""

RESERVE_SHARE = 10
"""Divides the memory: one part is left to everything else."""

LEAST_RESERVE_BYTES = 2 * 2**30
"""At least this much is left to everything else; on a small machine, half of the memory."""

SMALL_MAC_BYTES = 32 * 2**30
"""Up to this size, macOS recommends two thirds of the memory for the GPU, above three quarters."""

PROGRAM_LIMIT_S = 10.0

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
NO_LIMIT_BYTES = 2**60
"""A limit of a control group above this is none."""


class NoDeviceMemoryError(Exception):
    """MLX would use CUDA, and the memory of the device cannot be read."""


def find_backend() -> str:
    """Return `metal`, `cuda` or `cpu`, by the system and the installed packages."""
    if platform.system() == "Darwin":
        return "metal" if platform.machine() == "arm64" else "cpu"
    return "cuda" if any(_FOLDER.fullmatch(path.name) for path in installed()) else "cpu"


def installed() -> Iterator[Path]:
    """Yield the `.dist-info` folders of the installed packages.

    `importlib.metadata` looks for the same; to import it takes longer than all of `mlxsup show`.
    """
    for folder in map(Path, sys.path):
        with suppress(OSError):  # not every entry of the path is a folder that exists
            for name in os.listdir(folder):
                if name.endswith(".dist-info"):
                    yield folder / name


def find_budget(given_bytes: int | None, backend: str, *, own_bytes: int = 0) -> Budget:
    """Return the budget on this machine.

    Args:
        given_bytes: the key `memory_budget`; None: automatic.
        backend: that MLX uses: `cpu`, `cuda` or `metal`.
        own_bytes: what workers of this daemon hold on a GPU now; it is not others'.

    Raises:
        NoDeviceMemoryError: the device's memory is not known, and no budget is given.
    """
    if backend == "cuda" and given_bytes is None:
        return device_budget(*read_device(), own_bytes)
    if backend == "metal":
        automatic = mac_budget(ram_bytes(), _wired_limit())
    else:
        automatic = host_budget(ram_bytes(), control_group_limit())
    if given_bytes is None:
        return automatic
    return Budget(
        size_bytes=given_bytes,
        machine_bytes=max(given_bytes, automatic.machine_bytes),
        reason="memory_budget",
        automatic_bytes=automatic.size_bytes,
    )


def command_budget(given_bytes: int | None, backend: str, runtime_dir: Path) -> Budget:
    """Return the budget that a daemon with this runtime folder has, or would have.

    Memory that the workers of that folder hold on a GPU is not others'.

    Args:
        given_bytes: the key `memory_budget`; None: automatic.
        backend: that MLX uses: `cpu`, `cuda` or `metal`.
        runtime_dir: has the record of the workers that live.

    Raises:
        NoDeviceMemoryError: as of `find_budget`.
    """
    if backend != "cuda" or given_bytes is not None:
        return find_budget(given_bytes, backend)
    from ..workers.orphans import live_workers

    try:
        own = live_workers(runtime_dir)
    except OSError:  # the folder is another user's, and so are its workers
        own = []
    return find_budget(None, backend, own_bytes=held_on_device(own))


def ram_bytes() -> int:
    """Return the memory of the machine in bytes."""
    # As psutil has it, whose import takes a tenth of the time that a command may take to begin.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def mac_budget(total_bytes: int, wired_bytes: int) -> Budget:
    """Return what macOS recommends for the GPU.

    Args:
        total_bytes: of the machine.
        wired_bytes: what somebody has set instead; 0: nothing.
    """
    if wired_bytes:
        size, share = min(wired_bytes, total_bytes), "iogpu.wired_limit_mb"
    elif total_bytes > SMALL_MAC_BYTES:
        size, share = total_bytes * 3 // 4, "three quarters"
    else:
        size, share = total_bytes * 2 // 3, "two thirds"
    reason = f"{share} of {size_text(total_bytes)}, the recommended working set"
    return Budget(size_bytes=size, machine_bytes=total_bytes, reason=reason)


def _wired_limit() -> int:
    """Return what is set instead of the system's own limit, in bytes; 0: nothing."""
    try:
        return int(_said_by("sysctl", "-n", "iogpu.wired_limit_mb")) * 2**20
    except (OSError, ValueError):  # systems before the setting
        return 0


def reserve_bytes(total_bytes: int) -> int:
    """Return what is left to everything else on a machine with so much memory."""
    return min(max(total_bytes // RESERVE_SHARE, LEAST_RESERVE_BYTES), total_bytes // 2)


def host_budget(total_bytes: int, group_bytes: int | None) -> Budget:
    """Return the machine's memory or its control group's limit, less a reserve.

    Args:
        total_bytes: RAM.
        group_bytes: the limit of the control group; None: none.
    """
    what = "RAM"
    if group_bytes is not None and group_bytes < total_bytes:
        total_bytes, what = group_bytes, "the control group"
    reserve = reserve_bytes(total_bytes)
    reason = f"{size_text(total_bytes)} of {what} less a reserve of {size_text(reserve)}"
    return Budget(
        size_bytes=total_bytes - reserve,
        machine_bytes=total_bytes,
        reason=reason,
    )


def device_budget(total_bytes: int, used_bytes: int, own_bytes: int) -> Budget:
    """Return the memory of a GPU less what others hold of what is used."""
    others = max(0, used_bytes - own_bytes)
    reason = f"{size_text(total_bytes)} of GPU memory less {size_text(others)} that others hold"
    return Budget(
        size_bytes=max(0, total_bytes - others),
        machine_bytes=total_bytes,
        reason=reason,
    )


def largest_budget_bytes(given_bytes: int, backend: str) -> int:
    """Return the largest budget here: the memory of the machine, or of its GPU.

    Args:
        given_bytes: the budget in question; the device is only asked if it exceeds the RAM.
        backend: that MLX uses.
    """
    total = ram_bytes()
    limit = control_group_limit()
    host = total if limit is None else min(total, limit)
    if backend != "cuda" or given_bytes <= host:
        return host
    try:
        return max(host, read_device()[0])
    except NoDeviceMemoryError:
        return host


def read_device() -> tuple[int, int]:
    """Return the memory of the first GPU, as NVIDIA's own program says, and how much is used.

    Raises:
        NoDeviceMemoryError: the program is missing, or does not answer.
    """
    try:
        first = _said_by_nvidia_smi("gpu=memory.total,memory.used").splitlines()[0]
        total, used = (int(part) * 2**20 for part in first.split(","))
    except (OSError, ValueError, IndexError) as error:
        raise NoDeviceMemoryError(
            "MLX would use CUDA here, but nvidia-smi does not report the memory of the GPU; "
            "set memory_budget to a size"
        ) from error
    return total, used


def held_on_device(pids: Collection[int]) -> int:
    """Return how many bytes of the first GPU these processes hold.

    In a container, NVIDIA's own program may know none of them, or by other pids.
    """
    if not pids:
        return 0
    try:
        lines = _said_by_nvidia_smi("compute-apps=pid,used_gpu_memory").splitlines()
    except OSError:
        return 0
    wanted = {str(pid) for pid in pids}
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    # A driver that does not know the size says "[N/A]".
    known = [row for row in rows if len(row) == 2 and row[1].isdecimal()]
    return sum(int(size) * 2**20 for pid, size in known if pid in wanted)


def _said_by_nvidia_smi(query: str) -> str:
    """Return the lines of an answer about the first GPU; raise OSError as `_said_by`."""
    return _said_by("nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", "--id=0")


def _said_by(*command: str) -> str:
    """Return what a program prints.

    Raises:
        OSError: it is missing, fails, or takes too long.
    """
    import subprocess

    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=PROGRAM_LIMIT_S
        ).stdout
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error


def control_group_limit(root: Path = CGROUP_ROOT, own: Path = OWN_CGROUPS) -> int | None:
    """Return the smallest memory limit of the control groups that this process is in; None: none.

    Args:
        root: where the file system of control groups is mounted.
        own: lists the groups of this process.
    """
    if platform.system() != "Linux":
        return None
    limits = [limit for path in limit_files(root, own) if (limit := read_limit(path)) is not None]
    return min(limits, default=None)


def limit_files(root: Path, own: Path) -> list[Path]:
    """Return the files of limits of each group and of those around it: version 2, then 1."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        return []
    files: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, colon, group = rest.partition(":")
        if not colon:
            continue
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / group.lstrip("/")
        # Up to the root: in a container, the path of the group may be the host's.
        around = (one for one in (folder, *folder.parents) if one.is_relative_to(base))
        files += [one / name for one in around]
    return files


def read_limit(path: Path) -> int | None:
    """Return what a file of a limit says; None: there is no limit, or no such file."""
    try:
        text = path.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() and int(text) < NO_LIMIT_BYTES else None
