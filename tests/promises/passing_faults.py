"""P25: faults that pass: two crashes that accuse every row, then an engine that is healthy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mlxsup.client import Client

from .bounds import at_most, at_most_share
from .daemons import Daemon, ready
from .entries import SOON
from .measure import CPU, FAKE, Figure, Measure, Place, Values
from .watching import Changes, TimedReader
from support.daemon import fake, row
from support.eventually import eventually

MOST = 1.3
"""Times the undisturbed answers of 2,000 tokens, without the loads; in shorter ones the turns weigh
more, and it is only asserted that the suspects did not run to their ends one after the other."""
PATIENCE_S = 600.0

Entry = Callable[[Place, int], dict[str, Any]]


def fake_entry(place: Place, rows: int) -> dict[str, Any]:
    """Steps of 5 ms for 8 rows, of 10 ms for 64, so that the readers keep up."""
    options = {"step_s": 0.005 if rows <= 8 else 0.01}
    return fake(fake=options, max_concurrency=rows + 1, restart=SOON)


def real_entry(place: Place, rows: int) -> dict[str, Any]:
    """The tiny model on the CPU."""
    entry = {"path": str(place.tiny), "preload": True, "restart": SOON}
    return entry | {"max_concurrency": rows + 1}


class Strikes:
    """SIGSEGV to the worker, and how long each left no READY worker."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._changes = Changes(client)
        self.away_s = 0.0
        self.ready_at = 0.0

    def strike(self, then: Callable[[], None]) -> None:
        """Ends the worker, does something then, and waits until the next one is READY."""
        before = row(self._client, "m")
        os.kill(before["pid"], signal.SIGSEGV)
        left_at = self._changes.left_ready_at("m", before["generation"])
        then()
        self.ready_at = self._changes.ready_at("m", before["generation"] + 1)
        self.away_s += self.ready_at - left_at


def transient_faults(place: Place, *, entry: Entry, rows: int, at: tuple[float, float]) -> Values:
    """All answers at once, undisturbed and struck twice; the tokens must be the same.

    Args:
        entry: of the model.
        rows: answers at once.
        at: when every row has this share of its tokens, a fault strikes.
    """
    tokens = place.sizes.long_answer
    models = {"m": entry(place, rows)}
    with Daemon(models) as daemon, daemon.client() as client, daemon.client() as other:
        ready(client, "m")
        strikes = Strikes(client)

        def ask() -> list[TimedReader]:
            return [TimedReader(client, "m", f"row {n}", max_tokens=tokens) for n in range(rows)]

        def ends(readers: list[TimedReader]) -> tuple[list[list[int]], float]:
            results = [reader.finished(PATIENCE_S) for reader in readers]
            return [r.token_ids for r in results], max(reader.ended_at for reader in readers)

        start_s = time.monotonic()
        right, ended_at = ends(ask())
        undisturbed_s = ended_at - start_s

        start_s = time.monotonic()
        readers, newcomers = ask(), []

        def come() -> None:
            newcomers.append(TimedReader(other, "m", "newcomer", max_tokens=4))

        for share in at:
            reached = partial(have_reached, readers, int(share * tokens))
            eventually(reached, timeout_s=PATIENCE_S)
            strikes.strike(come)
        found, ended_at = ends(readers)
        struck_s = ended_at - start_s - strikes.away_s
        assert found == right, "other tokens"
        assert all(len(newcomer.finished().token_ids) == 4 for newcomer in newcomers)
        newcomer_s = newcomers[-1].times[0] - strikes.ready_at
        seen = row(client, "m")
        assert (seen["generation"], seen["quarantined"]) == (3, 0)
    assert struck_s <= rows / 2 * undisturbed_s, "the suspects ran one after the other"
    return {
        "without": undisturbed_s,
        "struck": struck_s,
        "ratio": struck_s / undisturbed_s,
        "newcomer": newcomer_s,
    }


def have_reached(readers: list[TimedReader], tokens: int) -> bool:
    """Whether each of them has that many tokens."""
    return all(len(reader.tokens) >= tokens for reader in readers)


def _measure(name: str, where: str, entry: Entry, rows: int, at: tuple[float, float]) -> Measure:
    when = " and ".join(f"{share:.0%}" for share in at)
    return Measure(
        promise="P25",
        name=name,
        most_repeats=3,
        where=where,
        round=partial(transient_faults, entry=entry, rows=rows, at=at),
        figures=(
            Figure(
                key="struck",
                what=f"{rows} answers of 2,000 tokens, SIGSEGV at {when} of them, all complete with"
                " the same tokens: until the last has ended, without the loads",
                without="without",
            ),
            Figure(
                key="ratio",
                what="the same: with / without",
                unit="",
                bound=at_most(MOST),
            ),
            Figure(
                key="newcomer",
                what="a new request in the second load: from READY to its first token",
                bound=at_most_share("struck", "the answers", 0.25),
            ),
        ),
    )


THIRDS = (1 / 3, 2 / 3)

MEASURES = (
    _measure("fake-8", FAKE, fake_entry, 8, THIRDS),
    _measure("fake-64", FAKE, fake_entry, 64, THIRDS),
    _measure("mlx-early", CPU, real_entry, 8, (0.1, 0.2)),
    _measure("mlx-late", CPU, real_entry, 8, THIRDS),
)
