"""`python -m simulation.digest [--seeds N] [--first N]`: one digest of each seed's run per line.

Two runs of one seed print the same line, whatever the hash seed of the interpreter: each event and
every action of its turn goes into the digest, in order.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from hashlib import blake2b

from mlxsup.supervisor.core.actions import Action
from mlxsup.supervisor.core.events import Event

from .world import World


def digest_of(seed: int) -> str:
    """The digest of one seed's run, as far as it came."""
    hashed = blake2b(digest_size=16)

    def record(event: Event, actions: Sequence[Action]) -> None:
        hashed.update(f"{event}\n{actions}\n".encode())

    world = World(seed, on_turn=record)
    world.run()
    return f"{seed} {world.events} {hashed.hexdigest()}"


def main() -> None:
    """Prints the digests."""
    parser = argparse.ArgumentParser(prog="simulation.digest")
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--first", type=int, default=1)
    given = parser.parse_args()
    for seed in range(given.first, given.first + given.seeds):
        print(digest_of(seed))


if __name__ == "__main__":
    main()
