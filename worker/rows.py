"""One request on the owner thread: its row for the engine, and the text of its answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlxsup.protocol.body import TEXT_FORMAT, RequestBody
from mlxsup.protocol.delta import pack_text
from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid, unfit
from mlxsup.protocol.ids import RequestKey, pack_token, pack_tokens
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import FinishReason, Priority
from mlxsup.protocol.step_batch import PlainRow
from mlxsup.protocol.worker_messages import (
    Acceptance,
    Dispatch,
    PrefillProgress,
    Resume,
    RowDelta,
)

from .answer import AnswerText
from .engine import EngineFacts, Prompt, Row, RowPrefill, RowToken, TextCodec
from .prompt_pieces import PromptPieces
from .text.channels import Piece
from .text.grammar import RowGrammar
from .text.tool_calls import ToolCallReader
from .text.tool_formats import UNKNOWN

SEED_BITS = 53
"""Of the seeds that are drawn here: every number of JavaScript is exact up to them."""

BYTES_PER_TOKEN = 4
REPLAY_REPORT_TOKENS = 1024

NO_CALLS_KNOWN = "the tool call format of this model is unknown, so its calls are left in the text"
NO_STRICT = "strict has no effect: it needs llguidance, and a tokenizer that llguidance knows"
NO_FORMAT_OF_CALLS = "tool_choice forces a call, so response_format has no effect"


def check_resume(resume: Resume, facts: EngineFacts, adapter: str = "") -> RemoteError | None:
    """Return the error of an answer that cannot continue in this engine, with its adapter; None if
    it can."""
    if resume.acceptance.fingerprint == facts.fingerprint_of(adapter):
        return None
    return RemoteError(
        ErrorCode.WORKER_CRASHED,
        "the model changed while its worker was restarted, so the answer cannot continue",
        detail={"tokens_sent": len(resume.delivered) // BYTES_PER_TOKEN},
    )


MOST_TOKENS_OF_ROW = 3_500_000
"""Prompt and answer together, whatever the model takes. What resumes a row after a crash has four
bytes for each token and must fit into one frame of 16 MiB."""


def plan_row(
    key: RequestKey,
    body: RequestBody,
    prompt: Prompt,
    facts: EngineFacts,
    *,
    delivered: Sequence[int] = (),
    shown: int = 0,
    sampling: Mapping[str, Any] | None = None,
    adapter: str = "",
) -> Row:
    """Plan the row of a request: check limits against the context (I6), and fill in every default.

    Args:
        delivered: ids of its answer that an earlier life produced; max_tokens counts them.
        shown: of how many tokens of the prompt the client was shown how likely they were.
        sampling: the model's own defaults, by the names of `parameters.Sampling`.
        adapter: that the request names; may be empty.

    Raises:
        RemoteError: `context_length_exceeded`, with the numbers; `invalid_request`, for ids or an
            adapter that the model does not have.
    """
    if facts.fingerprint_of(adapter) is None:
        raise unfit("model", f"the model's adapter {adapter} was removed; ask for another one")
    context = MOST_TOKENS_OF_ROW
    if body.tokenize is None:
        context = min(facts.context_length, context)
    else:
        body = replace(body, max_tokens=0, min_tokens=None, prompt_logprobs=None)
    max_tokens, min_tokens = _limits(body, len(prompt.tokens), context)
    bias = body.bias_by_token()
    stop_token_ids = tuple(sorted(set(body.stop_token_ids or ())))
    _check_ids("logit_bias", bias, facts)
    _check_ids("stop_token_ids", stop_token_ids, facts)
    return Row(
        key=key,
        tokens=prompt.tokens,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=body.ignore_eos or False,
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
        delivered=list(delivered),
        logit_bias=bias,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None if shown == len(prompt.tokens) else body.prompt_logprobs,
        grammar=prompt.grammar,
        checkpoints=prompt.checkpoints,
        pictures=prompt.pictures,
        sampling=Sampling(**{**(sampling or {}), **body.sampling}),
        adapter=adapter,
    )


def check_prompt(length: int, limit: int, room: int) -> None:
    """Raise if a prompt is too long.

    Args:
        length: of the prompt, or of a part of it, in tokens.
        limit: the context.
        room: of it that a prompt may take.

    Raises:
        RemoteError: `context_length_exceeded`, with the numbers.
    """
    if length > room:
        # Agents and frameworks compact their history if they find these words, as Anthropic's and
        # OpenAI's servers write them; few look at the code.
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"prompt is too long: {length} tokens > {room}; this model's maximum context length is"
            f" {limit} tokens, with room for an answer",
            detail={"prompt_tokens": length, "context_length": limit},
        )


def _limits(body: RequestBody, length: int, limit: int) -> tuple[int, int]:
    """Return the most and the fewest tokens of the answer; `length` is the prompt's, `limit` the
    context.

    Raises:
        RemoteError: `context_length_exceeded`, with the numbers.
    """
    detail = {"prompt_tokens": length, "context_length": limit}
    check_prompt(length, limit, limit - (body.max_tokens != 0))
    max_tokens = limit - length if body.max_tokens is None else body.max_tokens
    if body.cap_max_tokens:
        max_tokens = min(max_tokens, limit - length)
    if length + max_tokens > limit:
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{length} prompt tokens and max_tokens {max_tokens} exceed the context of {limit}; "
            f"at most {limit - length} fit",
            detail=detail | {"max_tokens": max_tokens},
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{length} prompt tokens and min_tokens {min_tokens} exceed the context of {limit}; "
            f"at most {limit - length} fit",
            detail=detail | {"min_tokens": min_tokens},
        )
    return max_tokens, min_tokens


def _check_ids(name: str, ids: Collection[int], facts: EngineFacts) -> None:
    if max(ids, default=0) >= facts.vocabulary_size:
        expected = f"ids below this model's vocabulary of {facts.vocabulary_size}"
        raise invalid(name, expected, max(ids))


def tools_warnings(body: RequestBody, prompt: Prompt, codec: TextCodec) -> tuple[str, ...]:
    """Warnings that a caller who offers tools should get from the beginning."""
    rules = codec.channel_rules
    if not body.callable_tools:
        return ()
    if body.choice.is_forced:
        return () if (body.response_format or TEXT_FORMAT) == TEXT_FORMAT else (NO_FORMAT_OF_CALLS,)
    if body.strict_tools and prompt.strict is None:
        return (NO_STRICT,)
    return (NO_CALLS_KNOWN,) if rules.tool_format is UNKNOWN else ()


def acceptance(row: Row, body: RequestBody, prompt: Prompt, facts: EngineFacts) -> Acceptance:
    """Make the acceptance of a request that will run, for the supervisor."""
    fingerprint = facts.fingerprint_of(row.adapter)
    assert fingerprint is not None
    return Acceptance(
        prompt_tokens=pack_tokens(row.tokens),
        opening=prompt.opening,
        parameters=body.parameters() | {"max_tokens": row.max_tokens, **asdict(row.sampling)},
        seed=row.seed,
        fingerprint=fingerprint,
        needs_body=bool(row.pictures),
    )


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """An accepted request: its row is in the engine, or will go there next.

    Attributes:
        key: the request this belongs to.
        answer: the text so far.
        tokens: of its prompt, read or not, and of its answer so far.
        priority, may_leave: as in its `Dispatch`.
        grammar: the grammar that the answer must follow.
        prompt: what the client is shown of the prompt, if it asked for that.
        stop_token_ids: of the request.
        warnings: sent with the first token.
        sampling: how its tokens are picked, sent with the first one; without defaults.
        inserted_at: monotonic seconds; 0 until then.
        cached_tokens: how many of the prompt's tokens needed no prefill.
        has_token: whether the first token, or the end, has come: prefill is over.
    """

    key: RequestKey
    answer: AnswerText
    tokens: int = 0
    priority: Priority = Priority.NORMAL
    may_leave: bool = True
    grammar: RowGrammar | None = None
    prompt: PromptPieces | None = None
    stop_token_ids: Collection[int] = ()
    warnings: Sequence[str] = ()
    sampling: Mapping[str, float] | None = None
    inserted_at: float = 0.0
    cached_tokens: int = 0
    has_token: bool = False

    def replay(self, row: Row, report: Callable[[], None] = lambda: None) -> list[RowDelta] | None:
        """Brings the text to where it was after the tokens that the client already has.

        Their text was sent with them; what they held back (half a character, half a stop string,
        half a tool call) is held back again.

        Args:
            row: includes what was delivered.
            report: called every REPLAY_REPORT_TOKENS: the work progresses, however long it is.

        Returns:
            The end of the answer, if those tokens were all of it; None if more is to come.
        """
        for number, token in enumerate(row.delivered):
            if number % REPLAY_REPORT_TOKENS == 0:
                report()
            self.answer.replay(token)
            if row.grammar is not None:
                row.grammar.accept(token)
        if self.answer.is_stopped:
            return self._deltas([], finish=self._stop())
        if row.grammar is not None and row.grammar.is_over:
            return self._ended([], FinishReason.STOP)
        if len(row.delivered) < row.max_tokens or row.prompt_logprobs is not None:
            return None
        return self._ended([], FinishReason.LENGTH)

    def advance(self, result: RowToken, now: float) -> Sequence[RowDelta | PlainRow]:
        """Read a step's token; return a delta for each channel that got text.

        If the last delta has a finish and the token had none, a stop string ended the answer and
        the row is still in the engine. The token that completed it is reported: it was
        generated, and counts.
        """
        token, text = result.token, ""
        if token is not None:
            self.tokens += 1
            text = self.answer.read(token)
            if self.has_token and result.finish is None and result.logprobs is None:
                channel = self.answer.plain_channel(text)
                if channel is not None:  # most tokens of most rows
                    return [PlainRow(self.key, pack_token(token), pack_text(text, channel))]
        return self._sort(result, text, now)

    def refusal(self, *, is_over: bool) -> RemoteError | None:
        """Return the error that an ended answer is, if it is not what its grammar owes.

        Args:
            is_over: whether it ended by itself.
        """
        return None if self.grammar is None else self.grammar.refusal(is_over=is_over)

    def _sort(self, result: RowToken, text: str, now: float) -> list[RowDelta]:
        """Do the same for a token with which something begins, ends or is said; `text` was read."""
        pieces: list[Piece] = []
        tokens, logprobs = b"", None
        if not self.has_token:
            pieces += [
                Piece(channel=self.answer.channel, text="", warning=warning)
                for warning in self.warnings
            ]
        if result.token is not None:
            pieces += self.answer.sort(text)
            tokens = pack_token(result.token)
            if result.logprobs is not None:
                logprobs = [self.answer.describe(result.token, result.logprobs)]
        if self.answer.is_stopped:
            deltas = self._deltas(pieces, finish=self._stop())
        elif result.finish is not None:
            deltas = self._ended(pieces, result.finish)
        else:
            deltas = self._deltas(pieces, finish=None)
        if result.ended_by in self.stop_token_ids:
            deltas[-1].stop_token = result.ended_by
        deltas[0].tokens, deltas[0].logprobs = tokens, logprobs
        if not self.has_token:
            self.has_token = True
            deltas[0].prefill_s = now - self.inserted_at
            deltas[0].cached_tokens = self.cached_tokens
            deltas[0].sampling = self.sampling
        return deltas

    def _ended(self, pieces: list[Piece], finish: FinishReason) -> list[RowDelta]:
        """Return the deltas of an answer that the engine has ended: after these pieces comes what
        was held back, in which there may be a stop string."""
        is_stop = finish is FinishReason.STOP
        pieces += self.answer.finish(is_cut=not is_stop)
        return self._deltas(pieces, self._stop() if is_stop or self.answer.is_stopped else finish)

    def _stop(self) -> FinishReason:
        return FinishReason.TOOL_CALLS if self.answer.has_calls else FinishReason.STOP

    def _deltas(self, pieces: Sequence[Piece], finish: FinishReason | None) -> list[RowDelta]:
        """Return one delta for each piece, at least one; the last has the finish."""
        deltas = [
            RowDelta(
                key=self.key,
                text=piece.text,
                channel=piece.channel,
                warning=piece.warning,
            )
            for piece in pieces
        ] or [RowDelta(key=self.key, channel=self.answer.channel)]
        deltas[-1].finish = finish
        if finish is not None:
            deltas[-1].stop = self.answer.stopped_by
        return deltas


def running_row(
    row: Row,
    body: RequestBody,
    prompt: Prompt,
    codec: TextCodec,
    dispatched: Dispatch,
    *,
    shown: int = 0,
) -> RunningRow:
    """Make the running row of a request, before its first token.

    Args:
        row: what the engine gets.
        body: what was asked for.
        prompt: what it answers.
        codec: the model's text side.
        dispatched: how the supervisor dispatched it.
        shown: see `plan_row`.
    """
    answer = AnswerText(
        codec,
        body.stop or (),
        prompt.opening,
        ToolCallReader(body.callable_tools, row.seed),
        form=body.form,
        min_tokens=row.min_tokens,
        strict=prompt.strict,
        after=row.tokens[-1] if body.echo and row.tokens else None,
    )
    pieces = None
    if body.shows_prompt:
        pieces = PromptPieces(
            row.key,
            row.tokens,
            text=prompt.text,
            has_logprobs=row.prompt_logprobs is not None,
            shown=shown,
            describe=answer.describe,
            has_ids=body.shows_ids,
        )
    warnings: tuple[str, ...] = ()
    if not row.delivered:
        warnings = tools_warnings(body, prompt, codec)
        if row.grammar is not None and row.grammar.warning:
            warnings += (row.grammar.warning,)
    return RunningRow(
        key=row.key,
        answer=answer,
        tokens=len(row.tokens) + len(row.delivered),
        priority=dispatched.priority,
        may_leave=dispatched.may_leave,
        grammar=row.grammar,
        prompt=pieces,
        stop_token_ids=row.stop_token_ids,
        warnings=warnings,
        sampling=None if row.delivered else row.sampling.unusual() or None,
    )


def progress_of(
    prefill: Sequence[RowPrefill], running: Container[RequestKey]
) -> list[PrefillProgress]:
    """Return the progress of the prompts that a step has read, to be sent to the supervisor; rows
    that have left since are left out."""
    return [
        PrefillProgress(key=row.key, done=row.done, total=row.total, computed=row.computed)
        for row in prefill
        if row.key in running
    ]
