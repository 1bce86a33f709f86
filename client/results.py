"""The items of a stream: pieces while it runs, a result at its end."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from mlxsup.protocol.client_messages import Timings, Usage
from mlxsup.protocol.message import Logprobs, Record, record
from mlxsup.protocol.states import Channel, FinishReason, NoticeKind


@record
class Delta(Record):
    """One piece of an answer.

    Attributes:
        text: new text; empty while a character or a stop string may be incomplete. On the
            channel `tool_call` one complete call, as a line of JSON.
        token_ids: the new tokens.
        channel: which part of the answer it belongs to.
        logprobs: those of each new token, if the request asked for them; on the channel `prompt`
            those of its next tokens.
        prompt_token_ids: on the channel `prompt`, its next ids, if the request asked for them.
        vector: what a text became, packed by `protocol.pooling.pack_vector`, if that was asked for;
            the token of the piece is the number of the text.
        sampling: of the first piece, how tokens are picked: the parameters that differ from the
            defaults of docs/http-api.md, whether the request or the model's entry has them.
    """

    text: str
    token_ids: list[int]
    channel: Channel = Channel.CONTENT
    logprobs: list[Logprobs] | None = None
    sampling: dict[str, float] | None = None
    prompt_token_ids: list[int] = field(default_factory=list)
    vector: bytes | None = None


@record
class Notice(Record):
    """News of what a request is waiting for.

    Attributes:
        kind: `queued`, `loading`, `prefilling`, `interrupted`, `paused`, `resumed` or `changed`.
        detail: `queued`: position, from 1, and reason · `loading`: state, phase, fraction ·
            `prefilling`: done and total, in tokens · `paused`: reason, tokens_sent · `resumed`:
            times, after (`crash` or `pause`) · `interrupted`: as the daemon sent it · `changed`:
            warnings, which the result has, too.
    """

    kind: NoticeKind
    detail: dict[str, Any]


@record
class Result(Record):
    """A whole answer.

    Attributes:
        text: the answer.
        reasoning: the model's reasoning before it, if the model shows that.
        tool_calls: the calls it asks for, in OpenAI's form: id, type, function (name, arguments).
            One that cannot be read has an empty name and its text as arguments, and adds a warning.
        token_ids: all generated tokens.
        logprobs: those of each token, if the request asked for them.
        finish_reason: how it ended.
        stop: the stop string that ended it, if one did.
        stop_token: the same for one of the request's `stop_token_ids`.
        prompt: the text of the prompt, if the request asked for it.
        prompt_token_ids: its ids, for the same reason.
        prompt_logprobs: those of each token of the prompt, if the request asked for them; the first
            one has none.
        usage: tokens counted, and engine seconds.
        timings: seconds spent.
        seed: the one that sampling used; None if the request ended before it was dispatched.
        resumed: how many times the stream continued after a crash or a restart.
        paused: how many times it continued after a pause.
        warnings: sentences for people.
        vectors: what each text became, packed, if that was asked for; `token_ids` has the number of
            each text, in the same order.
    """

    text: str
    finish_reason: FinishReason
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] | None = None
    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)
    seed: int | None = None
    resumed: int = 0
    paused: int = 0
    warnings: list[str] = field(default_factory=list)
    stop: str | None = None
    stop_token: int | None = None
    prompt: str = ""
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] | None = None
    vectors: list[bytes] = field(default_factory=list)
