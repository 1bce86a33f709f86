"""What the texts of the system's files say about memory; nothing here opens a file."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.memory.pressure import Strain

STALLED_PERCENT = 5.0
"""Memory is short if all processes waited for it for more of the last ten seconds."""

MAC_LEVELS = {1: Strain.EASY, 2: Strain.UNSAID, 4: Strain.STALLED}
"""What `kern.memorystatus_vm_pressure_level` says: normal, warning, critical."""

FILE_CACHE = ("inactive_file", "active_file")
"""In `memory.stat`: what the system drops if the group needs memory; `total_` is version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """What `/proc/meminfo` says.

    Attributes:
        total_bytes: RAM.
        available_bytes: what could be allocated without swapping.
    """

    total_bytes: int
    available_bytes: int


def host_memory(text: str) -> HostMemory:
    """What a `/proc/meminfo` says.

    Raises:
        ValueError: it does not.
    """
    sizes = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        number, _, unit = value.strip().partition(" ")
        if unit == "kB" and number.isdecimal():
            sizes[name] = int(number) * 1024
    try:
        return HostMemory(total_bytes=sizes["MemTotal"], available_bytes=sizes["MemAvailable"])
    except KeyError as missing:
        raise ValueError(f"no line {missing}") from None


def group_left_bytes(limit_bytes: int, used: str, statistics: str) -> int:
    """What a control group may still take, the file cache that it holds included.

    Args:
        limit_bytes: its limit.
        used: `memory.current`, or `memory.usage_in_bytes` of version 1.
        statistics: `memory.stat`; what it does not say counts as 0.

    Raises:
        ValueError: `used` is not a number.
    """
    sizes = {}
    for line in statistics.splitlines():
        name, _, number = line.partition(" ")
        if number.isdecimal():
            sizes[name] = int(number)
    dropped = sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in FILE_CACHE)
    return limit_bytes - int(used) + dropped


def stalled_percent(text: str) -> float:
    """For how much of the last ten seconds all processes waited for memory, in percent.

    Args:
        text: of `/proc/pressure/memory`, or of a group's `memory.pressure`.

    Raises:
        ValueError: it does not say so.
    """
    for line in text.splitlines():
        kind, *fields = line.split()
        if kind != "full":
            continue
        for field in fields:
            name, _, number = field.partition("=")
            if name == "avg10":
                return float(number)
    raise ValueError("no line full with avg10")


def linux_strain(stalls: str | None) -> Strain:
    """What a text of stalls says; None: there is none.

    Raises:
        ValueError: it cannot be read.
    """
    is_stalled = stalls is not None and stalled_percent(stalls) > STALLED_PERCENT
    return Strain.STALLED if is_stalled else Strain.UNSAID


def mac_strain(level: int) -> Strain:
    """What a pressure level of macOS says; an unknown one says nothing."""
    return MAC_LEVELS.get(level, Strain.UNSAID)
