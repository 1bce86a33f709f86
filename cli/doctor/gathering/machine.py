"""What is installed, how much memory there is, and what else the machine is set to."""

from __future__ import annotations

import importlib.util
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from mlxsup.protocol.version import VERSION

from ...exit_status import CliError
from ..facts import Machine, Memory, Package, Server, Software
from .setting import Setting

if TYPE_CHECKING:
    from mlxsup.supervisor.config.load import DaemonConfig

CPU_PACKAGE = "mlx-cpu"
"""With MLX's back-end for CPUs, on Linux."""

SERVERS = (
    "mlx_lm.server", "mlx-openai-server", "omlx", "ollama", "llama-server", "vllm", "LM Studio",
)  # fmt: skip
"""Programs that serve models, by the beginning of a word of their command line."""

FIRST_WORDS = 4
"""Of a command line: an interpreter, its options, and the program."""

LARGE_BYTES = 2**28
"""A server that holds less has no model loaded."""

SYSTEM_LIMIT_S = 2.0
"""How long a program of the system may take to answer."""

_SLEEP = re.compile(r"^\s*sleep\s+(\d+)", re.MULTILINE)


def system_name() -> str:
    """`Linux` or `Darwin`."""
    return platform.system()


def gather_software() -> Software:
    """Versions of what is installed next to mlxsup."""
    from mlxsup.supervisor.memory.machine import CUDA_PACKAGES, find_backend

    needs_back_end = system_name() == "Linux"
    return Software(
        version=VERSION,
        python=platform.python_version(),
        packages=tuple(_packages()),
        installer=installer(),
        system=system_name(),
        backend=find_backend(),
        has_backend=not needs_back_end
        or any(_version(name) is not None for name in (CPU_PACKAGE, *CUDA_PACKAGES)),
        has_gpu=needs_back_end and shutil.which("nvidia-smi") is not None,
    )


def installer() -> str:
    """The command that installs into this environment; uv's environments have no pip."""
    python = shlex.quote(sys.executable)
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {python}"
    return f"{python} -m pip install"


def _packages() -> Iterator[Package]:
    """What mlxsup needs in every case; nothing if it is not installed as a package."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("mlxsup") or []
    except metadata.PackageNotFoundError:
        return
    for line in lines:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        version = _version(needed.name)
        yield Package(
            name=needed.name,
            version=version,
            needed=str(needed.specifier),
            is_right=version is not None and needed.specifier.contains(version, prereleases=True),
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def gather_memory(setting: Setting) -> Memory:
    """The machine's memory, what is planned with it, and who else takes much of it."""
    from mlxsup.supervisor.memory.machine import NoDeviceMemoryError, command_budget, find_backend

    backend, machine = find_backend(), psutil.virtual_memory()
    given = setting.loaded.memory_budget if setting.loaded is not None else None
    size, automatic, reason = None, 0, ""
    try:
        budget = command_budget(given, backend, setting.runtime_dir)
        size, reason = budget.size_bytes, budget.reason
        automatic = size if budget.automatic_bytes is None else budget.automatic_bytes
    except NoDeviceMemoryError as error:
        reason = str(error)
    change, too_large = ("", ()) if setting.loaded is None else _plan(setting.loaded)
    return Memory(
        backend=backend,
        total_bytes=machine.total,
        available_bytes=machine.available,
        swap_used_bytes=psutil.swap_memory().used,
        budget_bytes=size,
        automatic_bytes=automatic,
        reason=reason,
        change=change,
        too_large=too_large,
        servers=tuple(_servers()),
    )


def _plan(configuration: DaemonConfig) -> tuple[str, tuple[str, ...]]:
    """What would make all models fit, and which do not fit even alone."""
    from ...commands.plan import plan_of

    try:
        plan = plan_of(configuration)
    except CliError:
        return "", ()  # there is no budget, which is a finding
    rows = [row for row in plan["models"] if not row["problem"]]
    return plan["change"] or "", tuple(row["name"] for row in rows if row["missing_bytes"])


def _servers() -> Iterator[Server]:
    for process in psutil.process_iter(["pid", "cmdline", "memory_info"]):
        memory, words = process.info["memory_info"], process.info["cmdline"] or []
        if memory is None or memory.rss < LARGE_BYTES:
            continue
        begins = [Path(word).name for word in words[:FIRST_WORDS]]
        name = next((s for s in SERVERS if any(b.startswith(s) for b in begins)), None)
        if name is not None:
            yield Server(pid=process.pid, name=name, size_bytes=memory.rss)


def gather_machine(setting: Setting) -> Machine:
    """The clock, and on macOS after how long the machine sleeps."""
    minutes = None
    if system_name() == "Darwin":
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                ["pmset", "-g"], capture_output=True, text=True, timeout=SYSTEM_LIMIT_S, check=True
            )
            minutes = sleep_minutes(said.stdout)
    counting = setting.configuration.counting
    files = [Path(__file__)]
    if counting is not None and counting.path.exists():
        files.append(counting.path)
    written = max(files, key=lambda path: path.stat().st_mtime)
    return Machine(
        system=system_name(),
        sleep_minutes=minutes,
        now_s=time.time(),
        written_s=written.stat().st_mtime,
        written_path=written,
    )


def sleep_minutes(said: str) -> int | None:
    """What `pmset -g` says about sleep; None if it does not mention it."""
    found = _SLEEP.search(said)
    return int(found.group(1)) if found else None
