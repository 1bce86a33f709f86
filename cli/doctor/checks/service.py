"""The service that runs the daemon, if there is one: what it starts, and with which file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..facts import Service
from ..finding import Finding, note, ok, problem

SUBJECT = "service"


def check_services(facts: Sequence[Service], config: Path | None) -> Iterator[Finding]:
    """Judges what the files of services start; nothing without one.

    Args:
        facts: a file each.
        config: the configuration file that commands read; None if there is none.
    """
    for service in facts:
        found = [*_found(service, config)]
        yield from found
        if not found:
            yield ok(SUBJECT, f"{service.path} starts {service.program}")


def _found(service: Service, config: Path | None) -> Iterator[Finding]:
    if service.problem:
        yield problem(
            SUBJECT,
            f"{service.path} {service.problem}",
            why="the service manager cannot start the daemon",
            fix=f"correct the file; {_applied(service)}",
        )
        return
    if not service.has_program:
        yield problem(
            SUBJECT,
            f"{service.path} starts {service.program}, which is not there",
            why="the service manager tries it in vain",
            fix=f"write the path there that `command -v mlxsup` prints; {_applied(service)}",
        )
    elif service.is_own_program is False:
        yield note(
            SUBJECT,
            f"{service.path} starts {service.program}, which is another mlxsup than this one",
            why="an upgrade of the one does not reach the other",
            fix=f"keep one of them; {_applied(service)}",
        )
    if service.config is not None and not service.has_config:
        yield problem(
            SUBJECT,
            f"{service.path} names {service.config}, which does not exist",
            why="the daemon exits with 78, and is not started again",
            fix=f"name the right file; {_applied(service)}",
        )
    elif service.config is not None and config is not None and service.config != config:
        yield note(
            SUBJECT,
            f"{service.path} names {service.config}, and commands here read {config}",
            why="commands here look for another daemon than the service's",
            fix=f"use `--config {service.config}`, or name the same file there",
        )
    yield from _manners(service)


def _manners(service: Service) -> Iterator[Finding]:
    """What the service manager does with a daemon that runs."""
    if not service.is_interactive:
        yield note(
            SUBJECT,
            f"{service.path} has no ProcessType Interactive",
            why="macOS limits how much processor time and disk the models get",
            fix=f"add <key>ProcessType</key><string>Interactive</string>; {_applied(service)}",
        )
    if service.lingers is False:
        yield note(
            SUBJECT,
            f"{service.path} runs only while you are logged in",
            why="the daemon ends when you log out, and does not start with the machine",
            command="loginctl enable-linger",
        )


def _applied(service: Service) -> str:
    """How a change of the file takes effect."""
    if service.manager == "launchd":
        return "`launchctl bootout` and `bootstrap` apply it"
    return "`systemctl daemon-reload` applies it (with `--user` if it is a user's)"
