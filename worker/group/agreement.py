"""What the ranks of a group must agree on before they load."""

from __future__ import annotations

import socket

from ..engine import BadLaunchError, BadModelError, ModelFiles
from .frames import Greeting


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
