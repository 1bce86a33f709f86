"""The worker's side of leases: who reads a chunk of a long prompt while other models do so, too.

The supervisor says whether leases are needed. While they are, each chunk of a long prompt takes
one. The message of a step gives back the lease that the step was made with and asks for the next
one, so that the turns of two workers do not depend on how quickly each of them asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.worker_messages import (
    Lease,
    Leases,
    PrefillProgress,
    RowDrafts,
    Step,
)

from .engine import Engine, Guessed, StepResult
from .link import LinkBrokenError


class _Stage(Enum):
    NONE = auto()
    ASKED = auto()
    HELD = auto()


class WorkerLeases:
    """Asks for leases and gives them back; one at a time.

    Args:
        engine: says whether its prompts are long.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stage = _Stage.NONE
        self._are_needed = False

    @property
    def is_asked(self) -> bool:
        """True if a lease was asked for and has not come."""
        return self._stage is _Stage.ASKED

    def heard(self, message: Leases | Lease) -> None:
        """Take a message of the supervisor about leases.

        Raises:
            LinkBrokenError: a lease came that was not asked for.
        """
        if isinstance(message, Leases):
            self._are_needed = message.are_needed
        elif self._stage is not _Stage.ASKED:
            raise LinkBrokenError("a lease came that was not asked for")
        else:
            self._stage = _Stage.HELD

    @property
    def may_read(self) -> bool:
        """True if the next step may read prompts.

        An engine reads its prompts together, so while a long one waits the short ones do, too.
        """
        if self._stage is _Stage.HELD or (self._stage is _Stage.NONE and not self._are_needed):
            return True
        return not self._engine.has_long_prompt()

    @property
    def has_news(self) -> bool:
        """True if there is a lease to give back, or one to ask for."""
        if self._stage is _Stage.NONE:
            return self._are_needed and self._engine.has_long_prompt()
        return self._stage is _Stage.HELD

    def step(
        self,
        result: StepResult,
        number: int,
        rows: list[Row],
        prefill: list[PrefillProgress],
        between_steps: int,
    ) -> Step:
        """Make the message of a step, with what there is to say about leases; each must be sent.

        Args:
            result: what the engine returned.
            number, rows, prefill, between_steps: see `Step`.
        """
        reads_on = self._engine.has_long_prompt()
        is_held = self._stage is _Stage.HELD
        may_ask = is_held or self._stage is _Stage.NONE
        is_asking = may_ask and self._are_needed and reads_on
        if may_ask:
            self._stage = _Stage.ASKED if is_asking else _Stage.NONE
        has_asked = self._stage is _Stage.ASKED
        return Step(
            step=number,
            rows=rows,
            prefill=prefill,
            took_s=result.took_s,
            decode_s=result.decode_s,
            between_steps=between_steps,
            reads_on=reads_on,
            returns_lease=is_held,
            wants_lease=is_asking,
            only_waits=has_asked and reads_on and not self._engine.has_decoding(),
            drafts=[] if result.guessed is None else _drafts(result.guessed, rows),
        )


def _drafts(guessed: Mapping[RequestKey, Guessed], rows: Sequence[Row]) -> list[RowDrafts]:
    """Return what has become of each row's guesses.

    Those behind a stop string were right, but are no part of the answer; the first token of a row
    was drawn before.
    """
    said = Counter(row.key for row in rows if row.tokens)
    return [
        RowDrafts(key=key, read=one.read, accepted=min(one.accepted, max(said[key] - 1, 0)))
        for key, one in guessed.items()
    ]
