"""What answers look like in OpenAI's API: pieces of a stream, and whole ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from mlxsup.client import Channel, Delta, Logprobs, Result, TokenLogprob
from mlxsup.client.tool_calls import read_tool_calls
from mlxsup.protocol.version import VERSION

from .. import limits
from ..failure import Failure, bad_field
from ..shape import Shape, encode, warned
from ..sse import event
from .errors import body_of
from .text_offsets import PromptOffsets, TextOffsets

FINGERPRINT = f"mlxsup-{VERSION}"

DONE = b"data: [DONE]\n\n"


LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class LogprobLists:
    """The log-probabilities of a completion, encoded as they come: those of a long prompt would
    hold up the event loop if all were encoded at the end."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {name: [] for name in LISTS}

    def add(self, logprobs: Sequence[Logprobs], offsets: list[int]) -> None:
        """Add those of the next tokens; see `completion_logprobs`."""
        if logprobs:
            for name, values in completion_logprobs(logprobs, offsets).items():
                self._parts[name].append(encode(values)[1:-1])

    def __bool__(self) -> bool:
        return bool(self._parts["tokens"])

    def encoded(self) -> str:
        """Return them as a completion has them."""
        lists = (f'"{name}":[{",".join(parts)}]' for name, parts in self._parts.items())
        return "{" + ",".join(lists) + "}"


@dataclass(slots=True)
class Counted:
    """What the pieces of one choice say so far.

    Attributes:
        reasoning_tokens: generated as reasoning.
        calls: tool calls that were sent.
        offsets: finds where a completion's tokens begin.
        text: of a completion, as far as it waits for the log-probabilities that it is sent with.
        lists: log-probabilities of a completion that were not sent yet.
        told: those of the prompt, encoded, if they come in a list of their own.
    """

    reasoning_tokens: int = 0
    calls: int = 0
    offsets: TextOffsets = field(default_factory=TextOffsets)
    prompt: PromptOffsets = field(default_factory=PromptOffsets)
    text: str = ""
    lists: LogprobLists = field(default_factory=LogprobLists)
    told: list[str] = field(default_factory=list)

    def take(self, delta: Delta) -> None:
        """One more piece has come."""
        if delta.channel is Channel.REASONING:
            self.reasoning_tokens += len(delta.token_ids)

    def take_text(self, delta: Delta) -> list[int]:
        """The same of a completion; gives where each token begins that has log-probabilities."""
        self.take(delta)
        if delta.channel is Channel.PROMPT:
            self.offsets.take(delta.text)
            self.prompt.add(delta.text)
            chosen = [one.chosen for one in delta.logprobs or ()]
            return self.prompt.take([one.raw_bytes or one.text.encode() for one in chosen])
        tokens = [one.chosen.text for one in delta.logprobs or ()]
        if delta.channel is Channel.CONTENT:
            return self.offsets.take(delta.text, tokens)
        return [self.offsets.shown] * len(tokens)  # no part of the text


@dataclass(slots=True)
class OpenAiShape(Shape):
    """The answers to one HTTP request.

    Attributes:
        id: of the answer.
        created: seconds since the epoch.
        model: as it was asked for.
        prompts: how many answers belong to one prompt: `n`.
        has_usage: whether a stream ends with its usage.
        tells_prompt: whether a list says how likely the tokens of the prompt were.
        told: how many tokens of prompts, and of others in their places, have come.
        counted: of each choice, by its number.
        begin: of the event of every chunk: made once, because there is a chunk for each token.
        close: its end; if a stream ends with its usage, all others have none yet.
    """

    id: str
    created: int
    model: str
    prompts: int = 1
    has_usage: bool = False
    tells_prompt: bool = False
    told: int = 0
    counted: dict[int, Counted] = field(default_factory=dict)
    begin: str = field(init=False)
    close: str = field(init=False)

    KIND = ""
    CHUNK_KIND = ""

    def __post_init__(self) -> None:
        self.begin = "data: " + encode(self._head(self.CHUNK_KIND)).removesuffix("}")
        self.close = ',"usage":null}\n\n' if self.has_usage else "}\n\n"

    def count(self, index: int) -> Counted:
        """What is known of one choice."""
        counted = self.counted.get(index)
        if counted is None:
            counted = self.counted[index] = Counted()
        return counted

    # ------------------------------------------------------------ pieces

    def end(self, results: Sequence[Result]) -> bytes:
        """The chunk with the usage, if it was asked for, and the mark."""
        usage = f'{self.begin},"choices":[],"usage":{encode(self._usage(results))}}}\n\n'
        return (usage.encode() if self.has_usage else b"") + DONE

    def broken(self, failure: Failure) -> bytes:
        """An event that holds the error."""
        return event(encode(body_of(failure)).encode())

    # ------------------------------------------------------------ whole

    def take(self, index: int, delta: Delta) -> None:
        """Counts it."""
        self.count(index).take(delta)
        if delta.channel is Channel.PROMPT:
            self.take_prompt(index, delta)

    def take_prompt(self, index: int, delta: Delta) -> None:
        """Notes how likely the next tokens of a prompt were.

        Raises:
            Failure: there are too many.
        """
        logprobs = delta.logprobs or []
        self.told += sum(1 + len(one.top) for one in logprobs)
        if self.told > limits.MAX_PROMPT_LOGPROBS:
            most = limits.MAX_PROMPT_LOGPROBS
            message = (
                f"the prompts have more than {most} log-probabilities; send fewer prompts at once"
            )
            raise bad_field("logprobs", message)
        if self.tells_prompt and logprobs:
            self.count(index).told.append(encode([prompt_logprob(one) for one in logprobs])[1:-1])

    def told_of(self, index: int) -> dict[str, str]:
        """Return the field that says how likely the tokens of a prompt were, encoded."""
        if not self.tells_prompt:
            return {}
        return {"prompt_logprobs": f"[{','.join(self.count(index).told)}]"}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """The whole answer."""
        return {
            **self._head(self.KIND),
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "usage": self._usage(results),
        }

    @abstractmethod
    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """One choice of a whole answer."""

    # ------------------------------------------------------------ inside

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f'{self.begin},"choices":[{encode(choice)}]{self.close}'.encode()

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Each prompt counts once, however many answers it has."""
        firsts = results[:: self.prompts]
        prompt = sum(result.usage.prompt_tokens for result in firsts)
        completion = sum(result.usage.completion_tokens for result in results)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {
                "cached_tokens": sum(result.usage.cached_tokens for result in firsts)
            },
            "completion_tokens_details": {
                "reasoning_tokens": sum(one.reasoning_tokens for one in self.counted.values())
            },
        }


class ChatShape(OpenAiShape):
    """`/v1/chat/completions`."""

    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    def first(self, index: int) -> bytes | None:
        """The role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """New text, reasoning, or whole tool calls."""
        if delta.channel is Channel.CONTENT and delta.logprobs is None:
            # Nearly every piece, written without a map of its parts.
            if not (text := delta.text):
                return None
            return (
                f'{self.begin},"choices":[{{"index":{index},"delta":{{"content":'
                f'{encode_basestring(text)}}},"finish_reason":null}}]{self.close}'
            ).encode()
        counted = self.count(index)
        counted.take(delta)
        if not delta.text and delta.logprobs is None:
            return None
        if delta.channel is Channel.TOOL_CALL:
            calls, _ = read_tool_calls(delta.text)
            numbered = [{"index": counted.calls + nth, **call} for nth, call in enumerate(calls)]
            counted.calls += len(calls)
            content: dict[str, Any] = {"tool_calls": numbered} if numbered else {}
        elif delta.channel is Channel.REASONING:
            content = {"reasoning_content": delta.text}
        else:
            content = {"content": delta.text}
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs)
        return self._delta(index, content, logprobs)

    def last(self, index: int, result: Result) -> bytes:
        """Why it ended."""
        reason = result.finish_reason.value
        choice = {"index": index, "delta": {}, "finish_reason": reason}
        return self._chunk(choice | stopped(result) | warned([result]))

    def body(self, results: Sequence[Result]) -> bytes:
        """The whole answer as JSON; vLLM has the prompt's log-probabilities beside the choices."""
        return with_fields(self.whole(results), self.told_of(0)).encode()

    def _delta(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._chunk({**choice, "finish_reason": None})

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": result.text if result.text or not result.tool_calls else None,
        }
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["tool_calls"] = result.tool_calls
        return {
            "index": index,
            "message": message,
            "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs),
            "finish_reason": result.finish_reason.value,
            **stopped(result),
            **warned([result]),
        }


@dataclass(slots=True)
class CompletionShape(OpenAiShape):
    """`/v1/completions`: one text, whatever its parts are.

    Attributes:
        has_echo: whether the text begins with the prompt.
        has_logprobs: whether every chunk has log-probabilities. Then the text of a token waits for
            the next token, so that the last one has the reason of the end, too.
    """

    has_echo: bool = False
    has_logprobs: bool = False

    KIND = "text_completion"
    CHUNK_KIND = "text_completion"

    def first(self, index: int) -> bytes | None:
        """Nothing: there is no role."""
        return None

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """New text; reasoning and calls of a bare prompt are no part of it."""
        counted = self.count(index)
        if not self.has_logprobs:
            counted.take(delta)
            text = delta.text if self._is_text(delta) else ""
            return self._text(index, text) if text else None
        chunk = None
        if delta.logprobs and counted.lists:
            chunk = self._logged({"index": index, "text": counted.text, "finish_reason": None})
            counted.text, counted.lists = "", LogprobLists()
        self.take(index, delta)
        return chunk

    def take(self, index: int, delta: Delta) -> None:
        """Counts it, and holds its text and log-probabilities."""
        counted = self.count(index)
        offsets = counted.take_text(delta)
        if delta.channel is Channel.PROMPT:
            self.take_prompt(index, delta)
        is_shown = delta.channel is not Channel.PROMPT or self.has_echo
        if self.has_logprobs and is_shown:
            counted.lists.add(delta.logprobs or (), offsets)
        if self._is_text(delta):
            counted.text += delta.text

    def _is_text(self, delta: Delta) -> bool:
        return delta.channel is Channel.CONTENT or (
            delta.channel is Channel.PROMPT and self.has_echo
        )

    def _text(self, index: int, text: str) -> bytes:
        return (
            f'{self.begin},"choices":[{{"index":{index},"text":{encode_basestring(text)},'
            f'"logprobs":null,"finish_reason":null}}]{self.close}'
        ).encode()

    def last(self, index: int, result: Result) -> bytes:
        """Why it ended, and what was held."""
        return self._logged(self._choice(index, result) | {"text": self.count(index).text})

    def body(self, results: Sequence[Result]) -> bytes:
        """The whole answer as JSON."""
        whole = self.whole(results)
        choices = [self._with_logprobs(choice) for choice in whole.pop("choices")]
        usage = encode(whole.pop("usage"))
        return with_fields(whole, {"choices": f"[{','.join(choices)}]", "usage": usage}).encode()

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """One choice without its log-probabilities, which are encoded already."""
        return {
            "index": index,
            "text": (result.prompt if self.has_echo else "") + result.text,
            "finish_reason": result.finish_reason.value,
            **stopped(result),
            **warned([result]),
        }

    def _logged(self, choice: dict[str, Any]) -> bytes:
        return f'{self.begin},"choices":[{self._with_logprobs(choice)}]{self.close}'.encode()

    def _with_logprobs(self, choice: dict[str, Any]) -> str:
        index = choice["index"]
        logprobs = self.count(index).lists.encoded() if self.has_logprobs else "null"
        return with_fields(choice, {"logprobs": logprobs, **self.told_of(index)})


def stopped(result: Result) -> dict[str, str | int]:
    """Return vLLM's `stop_reason`: the stop string or token of the request that ended an answer."""
    if result.stop is not None:
        return {"stop_reason": result.stop}
    return {} if result.stop_token is None else {"stop_reason": result.stop_token}


def with_fields(value: dict[str, Any], encoded: dict[str, str]) -> str:
    """Return an object as JSON with further fields that are encoded already."""
    fields = [f'"{name}":{text}' for name, text in encoded.items()]
    return ",".join([encode(value).removesuffix("}"), *fields]) + "}"


def prompt_logprob(logprobs: Logprobs) -> dict[str, Any] | None:
    """Return a prompt token in vLLM's form: log-probabilities by id; None for the first."""
    if logprobs.chosen.logprob is None:
        return None
    ranks = {one.token: rank for rank, one in enumerate(logprobs.top, start=1)}
    return {
        str(one.token): {
            "logprob": one.logprob, "rank": ranks.get(one.token), "decoded_token": one.text,
        }
        for one in (logprobs.chosen, *logprobs.top)
    }  # fmt: skip


def chat_logprobs(logprobs: Sequence[Logprobs]) -> dict[str, Any]:
    """The log-probabilities of tokens, as a chat has them."""
    content = [
        {**_token(one.chosen), "top_logprobs": [_token(other) for other in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(logprobs: Sequence[Logprobs], offsets: list[int]) -> dict[str, Any]:
    """The log-probabilities of tokens, as a completion has them.

    Args:
        logprobs: of the tokens.
        offsets: characters of the text before each of them.
    """
    return {
        "tokens": [_name(one.chosen) for one in logprobs],
        "token_logprobs": [one.chosen.logprob for one in logprobs],
        "top_logprobs": [
            None
            if one.chosen.logprob is None
            else {_name(other): other.logprob for other in one.top}
            for one in logprobs
        ],
        "text_offset": offsets,
    }


def _name(token: TokenLogprob) -> str:
    """One that is no whole text has its bytes as its name, or several would have the same one."""
    return f"bytes:{repr(token.raw_bytes)[2:-1]}" if token.raw_bytes else token.text


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.raw_bytes or token.text.encode("utf-8", "replace")),
    }
