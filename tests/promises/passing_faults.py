"""P25: faults that pass: two crashes that accuse every row, then an engine that is healthy."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from mlxsup.client import Client
from support.daemon import Daemon, fake, row, wait_for_state
from support.eventually import eventually

from .measure import CPU, FAKE, Figure, Measure, Place, Samples, Values
from .watching import Changes, TimedReader

SOON = {"max_restarts": 1_000_000, "backoff_initial_s": 0.05, "backoff_max_s": 0.1}
MOST = 1.3
"""Times the undisturbed answers, without the loads."""
LONG = 2000
"""Tokens of an answer for which that holds; in a short one the turns weigh more, and what is
checked is that the suspects did not run to their ends one after the other."""
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
        wait_for_state(client, "m", "READY")
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
    return {
        "without": undisturbed_s,
        "struck": struck_s,
        "ratio": struck_s / undisturbed_s,
        "most": MOST if tokens >= LONG else rows / 2,
        "newcomer": newcomer_s,
    }


def have_reached(readers: list[TimedReader], tokens: int) -> bool:
    """Whether each of them has that many tokens."""
    return all(len(reader.tokens) >= tokens for reader in readers)


def ratio_is_kept(samples: Samples) -> bool:
    """In every round."""
    return all(ratio <= most for ratio, most in zip(samples["ratio"], samples["most"], strict=True))


def newcomer_is_served(samples: Samples) -> bool:
    """Long before any of the answers has ended."""
    return all(n < s / 4 for n, s in zip(samples["newcomer"], samples["struck"], strict=True))


def _measure(
    where: str, entry: Entry, rows: int, at: tuple[float, float], *, is_held: bool = True
) -> Measure:
    when = " and ".join(f"{share:.0%}" for share in at)
    return Measure(
        promise="P25",
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
                target=f"≤{MOST}" if is_held else "reported",
                is_kept=ratio_is_kept if is_held else None,
            ),
            Figure(
                key="newcomer",
                what="a new request in the second load: from READY to its first token",
                target="a few steps, not an answer",
                is_kept=newcomer_is_served,
            ),
        ),
    )


THIRDS = (1 / 3, 2 / 3)

MEASURES = (
    _measure(FAKE, fake_entry, 8, THIRDS),
    _measure(FAKE, fake_entry, 64, THIRDS),
    _measure(CPU, real_entry, 8, (0.1, 0.2)),
    # On a CPU reading 2,000 tokens again takes a third of the time that giving them took.
    _measure(CPU, real_entry, 8, THIRDS, is_held=False),
)
