"""What the ranks of a group must agree on."""

from __future__ import annotations

import socket

from ..engine import BadLaunchError, BadModelError, DivergedError, EngineFacts, ModelFiles
from .frames import Greeting, Loaded


def free_address(host: str) -> str:
    """Return an address of this host, `ip:port`, on which nothing listens now.

    Raises:
        BadLaunchError: the host has no such address.
    """
    try:
        with socket.create_server((host, 0)) as listening:
            return f"{host}:{listening.getsockname()[1]}"
    except OSError:  # or a name that is not known there
        raise BadLaunchError(f"address must be one of this host's own, not {host}") from None


def check_greeting(rank: object, greeting: Greeting, files: ModelFiles) -> None:
    """Raise if a rank cannot take part.

    Args:
        rank: its name for people.
        greeting: of it.
        files: of the leader.

    Raises:
        BadLaunchError: other versions are installed on its host.
        BadModelError: its model has other files.
    """
    for name, version in files.versions.items():
        if (theirs := greeting.versions.get(name)) != version:
            raise BadLaunchError(
                f"{rank} has {name} {theirs}, not {version}; install the same on every host"
            )
    if greeting.fingerprint != files.fingerprint:
        raise BadModelError(
            f"{rank} has other model files than this host; copy the folder there again"
        )


def facts_to_compare(facts: EngineFacts) -> dict[str, object]:
    """Return what the loads of all ranks must have found out alike."""
    return {
        "batching": facts.batching.value,
        "context_length": facts.context_length,
        "vocabulary_size": facts.vocabulary_size,
    }


def check_facts(rank: object, loaded: Loaded, facts: EngineFacts) -> None:
    """Raise if a rank has found out something else about the model.

    Raises:
        DivergedError: names the rank and both values.
    """
    for name, value in facts_to_compare(facts).items():
        if (theirs := loaded.facts.get(name)) != value:
            raise DivergedError(f"{rank} has {name} {theirs}, not {value} as rank 0")
