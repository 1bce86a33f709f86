"""One request for vectors on the owner thread: its row for the engine, and what its client gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_token, pack_tokens
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.tasks import NOUNS, Task
from mlxsup.protocol.worker_messages import Acceptance, Dispatch, RowDelta

from .engine import EngineFacts, Prompt, Row, RowToken

NO_NUMBERS = (
    "the result for text {number} is not a number (NaN), so nothing is returned: the model's"
    " weights are damaged, or its numbers too small for this text"
)


def other_task(task: Task, asked: Task) -> RemoteError:
    """Return the error of a request that a model is not for."""
    ways = {
        Task.GENERATE: "send a chat to /v1/chat/completions",
        Task.EMBED: "send texts to /v1/embeddings",
        Task.RERANK: "send a query and documents to /v1/rerank",
    }
    return RemoteError(
        ErrorCode.INVALID_REQUEST,
        f"this model makes {NOUNS[task]}, not {NOUNS[asked]}: {ways[task]}, or use a model that"
        f" makes {NOUNS[asked]}",
        detail={"parameter": "model", "task": task.value},
    )


def check_lengths(lengths: Sequence[int], body: PoolingBody, limit: int) -> None:
    """Raise if a text is too long for the model.

    Args:
        lengths: tokens of each text, with what the model puts around it.
        body: the request.
        limit: tokens of one text, at most.

    Raises:
        RemoteError: `context_length_exceeded`, with the numbers.
    """
    longest = max(lengths)
    if longest > limit:
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{body.name}[{lengths.index(longest)}] has {longest} tokens, and this model reads"
            f" {limit}: send shorter pieces, or truncate: true",
            detail={"parameter": "texts", "prompt_tokens": longest, "context_length": limit},
        )


def plan_pooling_row(
    key: RequestKey, body: PoolingBody, prompt: Prompt, delivered: Sequence[int]
) -> Row:
    """Return the row of a request.

    Args:
        delivered: the numbers of the texts whose vectors the client has.
    """
    return Row(
        key=key,
        tokens=prompt.tokens,
        max_tokens=len(prompt.lengths),
        seed=0,
        delivered=list(delivered),
        lengths=prompt.lengths,
        dimensions=body.dimensions or 0,
    )


def pooling_acceptance(row: Row, body: PoolingBody, facts: EngineFacts) -> Acceptance:
    """Return what the supervisor gets to know about a request that will run."""
    return Acceptance(
        prompt_tokens=pack_tokens(row.tokens),
        opening="",
        parameters=body.parameters() | {"lengths": list(row.lengths)},
        seed=0,
        fingerprint=facts.fingerprint,
    )


@dataclass(slots=True, kw_only=True)
class PoolingRow:
    """An accepted request for vectors, with what the loop reads of a `RunningRow`.

    Attributes:
        key: the request this belongs to.
        tokens: of all its texts.
        left: how many of them have not been answered.
        priority, may_leave: as in its `Dispatch`.
        inserted_at: monotonic seconds; 0 until then.
        cached_tokens: none is ever known.
        error: why it ends without its vectors; None while it does not.
    """

    key: RequestKey
    tokens: int
    left: int
    priority: Priority = Priority.NORMAL
    may_leave: bool = True
    inserted_at: float = 0.0
    cached_tokens: int = 0
    error: RemoteError | None = None
    prompt: None = None
    _has_begun: bool = False

    @classmethod
    def of(cls, row: Row, dispatched: Dispatch) -> PoolingRow:
        """Return that of a row."""
        return cls(
            key=row.key,
            tokens=len(row.tokens),
            left=len(row.lengths) - len(row.delivered),
            priority=dispatched.priority,
            may_leave=dispatched.may_leave,
        )

    def replay(self, row: Row, report: Callable[[], None] = lambda: None) -> list[RowDelta] | None:
        """Return the end of the answer if all of it was delivered; None if more is to come."""
        return None if self.left else [RowDelta(key=self.key, finish=FinishReason.STOP)]

    def advance(self, result: RowToken, now: float) -> list[RowDelta]:
        """Return what the vector of a text means for the stream."""
        assert result.token is not None
        if not result.vector:
            message = NO_NUMBERS.format(number=result.token)
            self.error = RemoteError(ErrorCode.INTERNAL, message)
            return [RowDelta(key=self.key, finish=FinishReason.STOP)]
        self.left -= 1
        delta = RowDelta(
            key=self.key,
            tokens=pack_token(result.token),
            vector=result.vector,
            finish=None if self.left else FinishReason.STOP,
        )
        if not self._has_begun:
            self._has_begun = True
            delta.prefill_s = now - self.inserted_at
        return [delta]

    def refusal(self, *, is_over: bool) -> RemoteError | None:
        """Return the error that the request ends with; None if it ends well."""
        return self.error
