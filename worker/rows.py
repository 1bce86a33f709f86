"""One request on the owner thread: what it asks of the engine, and the text of its answer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxsup.protocol.body import RequestBody, invalid
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import RequestKey, pack_tokens
from mlxsup.protocol.messages import Acceptance, Logprobs, Resume, RowDelta, TokenLogprob
from mlxsup.protocol.parameters import SAMPLING, sampling_defaults
from mlxsup.protocol.states import Channel, FinishReason

from .engine import EngineFacts, Prompt, Row, RowLogprobs, RowToken, TextCodec
from .stops import StopMatcher

SEED_BITS = 63
BYTES_PER_TOKEN = 4


def check_resume(resume: Resume, facts: EngineFacts) -> RemoteError | None:
    """Why an answer cannot go on in this engine; None if it can."""
    if resume.acceptance.fingerprint == facts.fingerprint:
        return None
    return RemoteError(
        ErrorCode.WORKER_CRASHED,
        "the model changed while its worker was restarted, so the answer cannot go on",
        detail={"tokens_sent": len(resume.delivered) // BYTES_PER_TOKEN},
    )


def plan_row(
    key: RequestKey,
    body: RequestBody,
    prompt: Prompt,
    facts: EngineFacts,
    *,
    delivered: Sequence[int] = (),
    sampling: Mapping[str, Any] | None = None,
) -> Row:
    """The row of a request: limits checked against the context (I6), every default filled in.

    Args:
        delivered: ids of its answer that an earlier life gave already; max_tokens counts them.
        sampling: the model's own defaults, by the names of `parameters.SAMPLING`.

    Raises:
        RemoteError: `context_length_exceeded`, with the numbers; `invalid_request`, for ids that
            the model does not have.
    """
    length, limit = len(prompt.tokens), facts.context_length
    detail = {"prompt_tokens": length, "context_length": limit}
    if length + 1 > limit:
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"the prompt has {length} tokens; the context of {limit} leaves no room for an answer",
            detail=detail,
        )
    max_tokens = limit - length if body.max_tokens is None else body.max_tokens
    if length + max_tokens > limit:
        raise RemoteError(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{length} prompt tokens and max_tokens {max_tokens} exceed the context of {limit}; "
            f"at most {limit - length} fit",
            detail=detail | {"max_tokens": max_tokens},
        )
    bias = body.bias_by_token()
    if bias and max(bias) >= facts.vocabulary_size:
        expected = f"ids below this model's vocabulary of {facts.vocabulary_size}"
        raise invalid("logit_bias", expected, max(bias))
    effective = sampling_defaults() | dict(sampling or {})
    asked = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    return Row(
        key=key,
        tokens=prompt.tokens,
        max_tokens=max_tokens,
        seed=secrets.randbits(SEED_BITS) if body.seed is None else body.seed,
        delivered=list(delivered),
        logit_bias=bias,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **(effective | asked),
    )


def acceptance(row: Row, body: RequestBody, prompt: Prompt, facts: EngineFacts) -> Acceptance:
    """What is told to the supervisor of a request that will run."""
    return Acceptance(
        prompt_tokens=pack_tokens(row.tokens),
        channel=prompt.channel,
        parameters=body.parameters()
        | {name: getattr(row, name) for name in ("max_tokens", *SAMPLING)},
        seed=row.seed,
        fingerprint=facts.fingerprint,
    )


class AnswerText:
    """The text of one answer: token ids in, text out, half characters and stop strings held back.

    Args:
        codec: the model's text side.
        stops: the request's stop strings.
    """

    def __init__(self, codec: TextCodec, stops: Sequence[str]) -> None:
        self._codec = codec
        self._detokenizer = codec.detokenizer()
        self._matcher = StopMatcher(stops)

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self._matcher.is_stopped

    def add(self, token: int) -> str:
        """The text that became certain with this token."""
        return self._matcher.add(self._detokenizer.add(token))

    def describe(self, token: int, logprobs: RowLogprobs) -> Logprobs:
        """Logprobs as clients see them, with texts."""

        def one(token: int, logprob: float) -> TokenLogprob:
            return TokenLogprob(token=token, logprob=logprob, text=self._codec.token_text(token))

        return Logprobs(
            chosen=one(token, logprobs.logprob),
            top=[one(other, logprob) for other, logprob in logprobs.top],
        )

    def finish(self) -> str:
        """What was still held back, when no more token comes."""
        return self._matcher.add(self._detokenizer.finish()) + self._matcher.finish()


@dataclass(slots=True, kw_only=True)
class RunningRow:
    """A request that was accepted: its row is in the engine, or is the next to go there.

    Attributes:
        key: whose.
        answer: the text so far.
        channel: the part of the answer that comes now.
        inserted_at: monotonic seconds; 0 until then.
        cached_tokens: of the prompt, that needed no prefill.
        has_token: whether the first token, or the end, has come: prefill is over.
    """

    key: RequestKey
    answer: AnswerText
    channel: Channel
    inserted_at: float = 0.0
    cached_tokens: int = 0
    has_token: bool = False

    def replay(self, row: Row) -> RowDelta | None:
        """Takes the text to where it stood after the tokens that the client has already.

        What they show was sent with them; what they hold back (half a character, half a stop
        string) is held back again.

        Returns:
            The end of the answer, where those tokens were all of it; None if more is to come.
        """
        for token in row.delivered:
            self.answer.add(token)
        if self.answer.is_stopped:
            return RowDelta(key=self.key, channel=self.channel, finish=FinishReason.STOP)
        if len(row.delivered) < row.max_tokens:
            return None
        text = self.answer.finish()
        finish = FinishReason.STOP if self.answer.is_stopped else FinishReason.LENGTH
        return RowDelta(key=self.key, text=text, channel=self.channel, finish=finish)

    def advance(self, result: RowToken, now: float) -> RowDelta:
        """What a step's token means for the stream.

        Where the delta has a finish and the token had none, a stop string ended the answer and the
        row is still in the engine. The token that completed a stop string is reported: it was
        generated, and counts.
        """
        text, tokens, finish, logprobs = "", b"", result.finish, None
        if result.token is not None:
            text = self.answer.add(result.token)
            tokens = pack_tokens([result.token])
            if result.logprobs is not None:
                logprobs = [self.answer.describe(result.token, result.logprobs)]
        if finish is not None and not self.answer.is_stopped:
            text += self.answer.finish()
        if self.answer.is_stopped:
            finish = FinishReason.STOP
        is_first, self.has_token = not self.has_token, True
        return RowDelta(
            key=self.key,
            text=text,
            tokens=tokens,
            channel=self.channel,
            finish=finish,
            prefill_s=now - self.inserted_at if is_first else None,
            cached_tokens=self.cached_tokens if is_first else 0,
            logprobs=logprobs,
        )
