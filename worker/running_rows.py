"""The rows of the batch, and what the supervisor has not been sent of those that have left it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason
from mlxsup.protocol.step_batch import Row
from mlxsup.protocol.text import log_line

from .engine import RowPrefill, RowToken
from .pooling_rows import PoolingRow
from .rows import RunningRow

AnyRow = RunningRow | PoolingRow

logger = logging.getLogger(__name__)


class RunningRows:
    """Every row of the batch, in the order in which they joined; all bounded by its places.

    What happens between two steps is reported with the next message of a step.
    """

    def __init__(self) -> None:
        self._rows: dict[RequestKey, AnyRow] = {}
        self._reading: set[RequestKey] = set()  # those whose first token has not come
        self._ended: list[Row] = []
        self._refused: list[tuple[RequestKey, RemoteError]] = []  # without their formats

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._rows)

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def values(self) -> Collection[AnyRow]:
        """Return the rows themselves."""
        return self._rows.values()

    @property
    def is_reading(self) -> bool:
        """True if the first token of a row has not come yet."""
        return bool(self._reading)

    @property
    def has_ended(self) -> bool:
        """True if there is something to report besides a step."""
        return bool(self._ended)

    @property
    def unreported(self) -> int:
        """Count the requests that have left without a report of that to the supervisor."""
        if not self._ended and not self._refused:
            return 0
        return len(self._refused) + sum(bool(delta.finish or delta.paused) for delta in self._ended)

    def join(self, row: AnyRow) -> None:
        """Add a request whose row the engine has."""
        self._rows[row.key] = row
        self._reading.add(row.key)

    def leave(self, key: RequestKey) -> AnyRow | None:
        """Remove a request whose row the engine has no longer, or will not have; return its row, or
        None if it had none."""
        self._reading.discard(key)
        return self._rows.pop(key, None)

    def take_prompts(self, prefill: Iterable[RowPrefill]) -> None:
        """Note what a step has found out of prompts; report their log-probabilities, before the
        tokens of the same step."""
        for read in prefill:
            row = self._rows.get(read.key)
            if row is None:
                continue
            if read.known is not None:
                row.cached_tokens = read.known
            if read.logprobs and row.prompt is not None:
                self._ended += row.prompt.take(read.logprobs)

    def end(self, *deltas: Row) -> None:
        """Keep the rest of an answer that ends, or leaves, between two steps."""
        self._ended += deltas

    def take(
        self, tokens: Iterable[RowToken], now: float
    ) -> tuple[list[Row], int, list[RequestKey]]:
        """Take the deltas to send after a step.

        Args:
            tokens: what it gave.
            now: monotonic seconds.

        Returns:
            The deltas; how many of the first are from before the step; and the rows that the engine
            must be rid of.
        """
        deltas, self._ended = self._ended, []
        between_steps = len(deltas)
        leaving: list[RequestKey] = []
        for token in tokens:
            row = self._rows.get(token.key)
            if row is None:
                if token.key in leaving:
                    continue  # guessed right, behind the stop string that has ended the answer
                # A row that has left must not linger as a phantom that fills a slot (D8).
                logger.warning(log_line("token for a row that is gone", key=token.key))
                leaving.append(token.key)
                continue
            said = row.advance(token, now)
            deltas += said
            if said[-1].finish is not None:
                self._end(row, said)
                self.leave(token.key)
                if token.finish is None:
                    leaving.append(token.key)
            elif self._reading:
                self._reading.discard(token.key)
        return deltas, between_steps, leaving

    def advance(self, row: AnyRow, token: RowToken, now: float) -> tuple[Sequence[Row], bool]:
        """Read the last token of a row that leaves; return its deltas, and whether the answer is
        over with it."""
        deltas = row.advance(token, now)
        is_over = deltas[-1].finish is not None
        if is_over:
            self._end(row, deltas)
        return deltas, is_over

    def end_without_row(self, row: AnyRow, deltas: Sequence[Row]) -> None:
        """Take the end of an answer that has no row in the engine any longer."""
        self._end(row, deltas)
        self.end(*deltas)

    def _end(self, row: AnyRow, deltas: Sequence[Row]) -> None:
        """End an answer with an error, and not with these, if it is not what it should be."""
        refusal = row.refusal(is_over=deltas[-1].finish is FinishReason.STOP)
        if refusal is not None:
            deltas[-1].finish = None
            self._refused.append((row.key, refusal))

    def take_refused(self) -> list[tuple[RequestKey, RemoteError]]:
        """Return the answers without their formats, to be reported after their deltas."""
        refused, self._refused = self._refused, []
        return refused
