"""The property list of launchd; see launchd.plist(5).

launchd joins several conditions of `KeepAlive` by *or*, so there is only `SuccessfulExit`, and
`start --service` ends with 0 if another start would not help.
"""

from __future__ import annotations

import plistlib
from typing import Any
from xml.parsers.expat import ExpatError

from .facts import MARKER, NAME, ServiceFacts

OPEN_FILES = 10240
"""The soft limit is 256 unless a job says otherwise."""

OUTPUT_NAME = "service.out"
"""In the log folder: what the daemon prints, above all why it could not start."""


def plist_text(facts: ServiceFacts) -> str:
    """The job of the service."""
    text = plistlib.dumps(plist(facts), sort_keys=False).decode()
    return text.replace("<plist ", f"<!-- {MARKER} -->\n<plist ", 1)


def plist(facts: ServiceFacts) -> dict[str, Any]:
    """What the job says.

    `SuccessfulExit` is the only condition of KeepAlive, because any of several would start it
    again. launchd cannot make an exception for exit codes, so `--service` does.
    """
    job: dict[str, Any] = {
        "Label": NAME,
        "ProgramArguments": [
            str(facts.program), "start", "--service", "--config", str(facts.config),
        ],
        "EnvironmentVariables": facts.environment,
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": 10,
        "ExitTimeOut": facts.stop_s,
        "ProcessType": "Interactive",
        "SoftResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "HardResourceLimits": {"NumberOfFiles": OPEN_FILES},
        "StandardOutPath": str(facts.log_dir / OUTPUT_NAME),
        "StandardErrorPath": str(facts.log_dir / OUTPUT_NAME),
    }  # fmt: skip
    if facts.is_system:
        return {**job, "UserName": facts.user}
    return {**job, "LimitLoadToSessionType": ["Aqua", "Background"]}


def program_in(text: str) -> str | None:
    """Which program a job starts; None if it was not written by `plist_text`."""
    try:
        job = plistlib.loads(text.encode("utf-8", "surrogateescape"))
        program = job["ProgramArguments"][0]
    except (ValueError, ExpatError, KeyError, TypeError, IndexError):
        return None
    return program if MARKER in text and isinstance(program, str) else None


def output_in(text: str) -> str | None:
    """The file with what the job prints."""
    try:
        path = plistlib.loads(text.encode("utf-8", "surrogateescape")).get("StandardErrorPath")
    except (ValueError, ExpatError, AttributeError):
        return None
    return path if isinstance(path, str) else None


def exit_time_out_in(text: str) -> float | None:
    """How many seconds a job may take to end; None if the file does not say so."""
    try:
        limit_s = plistlib.loads(text.encode("utf-8", "surrogateescape")).get("ExitTimeOut")
    except (ValueError, ExpatError, AttributeError):
        return None
    is_limit = type(limit_s) in (int, float) and limit_s > 0
    return float(limit_s) if is_limit else None
