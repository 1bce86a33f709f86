"""What answers look like in OpenAI's API: pieces of a stream, and whole ones."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from mlxsup.client import Channel, Delta, Result
from mlxsup.client.tool_calls import read_tool_calls
from mlxsup.protocol.version import VERSION

from .. import limits
from ..ask import Ask
from ..custom_tools import custom_input
from ..errors import openai_body
from ..failure import Failure, bad_field
from ..shape import Shape, encode, warned
from ..sse import event
from .logprobs import LogprobLists, PromptOffsets, TextOffsets, chat_logprobs, prompt_logprob

FINGERPRINT = f"mlxsup-{VERSION}"

DONE = b"data: [DONE]\n\n"


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
        """Count one more piece."""
        if delta.channel is Channel.REASONING:
            self.reasoning_tokens += len(delta.token_ids)

    def take_text(self, delta: Delta) -> list[int]:
        """Count a piece of a completion; return where tokens with log-probabilities begin."""
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


class OpenAiShape(Shape):
    """The answers to one HTTP request.

    Attributes:
        begin: of the event of every chunk: made once, because there is a chunk for each token.
        close: its end; if a stream ends with its usage, all others have none yet.
        counted: of each choice, by its number.
    """

    PREFIX = ""
    KIND = ""
    CHUNK_KIND = ""

    def __init__(self, ask: Ask, name: str, created: int) -> None:
        self._ask = ask
        self._id = f"{self.PREFIX}-{name}"
        self._created = created
        self._told = 0  # tokens of prompts, and others in their places, that have come
        self.counted: defaultdict[int, Counted] = defaultdict(Counted)
        self.begin = "data: " + encode(self._head(self.CHUNK_KIND)).removesuffix("}")
        self.close = ',"usage":null}\n\n' if ask.has_usage else "}\n\n"

    # ------------------------------------------------------------ pieces

    def end(self, results: Sequence[Result]) -> bytes:
        """Return the chunk with the usage, if it was asked for, and the mark."""
        usage = f'{self.begin},"choices":[],"usage":{encode(self._usage(results))}}}\n\n'
        return (usage.encode() if self._ask.has_usage else b"") + DONE

    def broken(self, failure: Failure) -> bytes:
        """Return an event that holds the error."""
        return event(encode(openai_body(failure)).encode())

    # ------------------------------------------------------------ whole

    def take(self, index: int, delta: Delta) -> None:
        """Count it."""
        self.counted[index].take(delta)
        if delta.channel is Channel.PROMPT:
            self.take_prompt(index, delta)

    def take_prompt(self, index: int, delta: Delta) -> None:
        """Note how likely the next tokens of a prompt were."""
        logprobs = delta.logprobs or []
        self._told += sum(1 + len(one.top) for one in logprobs)
        if self._told > limits.MAX_PROMPT_LOGPROBS:
            most = limits.MAX_PROMPT_LOGPROBS
            message = (
                f"the prompts have more than {most} log-probabilities; send fewer prompts at once"
            )
            raise bad_field("logprobs", message)
        if self._ask.tells_prompt and logprobs:
            self.counted[index].told.append(encode([prompt_logprob(one) for one in logprobs])[1:-1])

    def told_of(self, index: int) -> dict[str, str]:
        """Return the field that says how likely the tokens of a prompt were, encoded."""
        if not self._ask.tells_prompt:
            return {}
        return {"prompt_logprobs": f"[{','.join(self.counted[index].told)}]"}

    def whole(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the whole answer."""
        return {
            **self._head(self.KIND),
            "choices": [self._choice(index, result) for index, result in enumerate(results)],
            "usage": self._usage(results),
        }

    @abstractmethod
    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """Return one choice of a whole answer."""

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._ask.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return f'{self.begin},"choices":[{encode(choice)}]{self.close}'.encode()

    def _usage(self, results: Sequence[Result]) -> dict[str, Any]:
        """Return the usage; each prompt counts once, however many answers it has."""
        firsts = results[:: self._ask.n]
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
                "reasoning_tokens": sum(one.reasoning_tokens for one in self.counted.values()),
                **_predictions(results),
            },
        }


def _predictions(results: Sequence[Result]) -> dict[str, int]:
    """Return how many guesses of tokens were right and wrong; nothing if there were none."""
    drafted = sum(result.usage.drafted for result in results)
    accepted = sum(result.usage.draft_accepted for result in results)
    if not drafted:
        return {}
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": drafted - accepted,
    }


class ChatShape(OpenAiShape):
    """`/v1/chat/completions`."""

    PREFIX = "chatcmpl"
    KIND = "chat.completion"
    CHUNK_KIND = "chat.completion.chunk"

    def first(self, index: int) -> bytes:
        """Return the role."""
        return self._delta(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return new text, reasoning, or whole tool calls."""
        if delta.channel is Channel.CONTENT and delta.logprobs is None:
            # Nearly every piece, written without a map of its parts.
            if not (text := delta.text):
                return None
            return (
                f'{self.begin},"choices":[{{"index":{index},"delta":{{"content":'
                f'{encode_basestring(text)}}},"finish_reason":null}}]{self.close}'
            ).encode()
        counted = self.counted[index]
        counted.take(delta)
        if not delta.text and delta.logprobs is None:
            return None
        if delta.channel is Channel.TOOL_CALL:
            calls, _ = read_tool_calls(delta.text)
            numbered = [
                {"index": counted.calls + nth, **self._call(call)} for nth, call in enumerate(calls)
            ]
            counted.calls += len(calls)
            content: dict[str, Any] = {"tool_calls": numbered} if numbered else {}
        elif delta.channel is Channel.REASONING:
            content = {"reasoning_content": delta.text}
        else:
            content = {"content": delta.text}
        logprobs = None if delta.logprobs is None else chat_logprobs(delta.logprobs)
        return self._delta(index, content, logprobs)

    def last(self, index: int, result: Result) -> bytes:
        """Return why it ended."""
        reason = result.finish_reason.value
        choice = {"index": index, "delta": {}, "finish_reason": reason}
        return self._chunk(choice | stopped(result) | warned([result]))

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer; vLLM has a prompt's log-probabilities beside the choices."""
        return with_fields(self.whole(results), self.told_of(0)).encode()

    def _delta(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice: dict[str, Any] = {"index": index, "delta": content}
        if logprobs is not None:
            choice["logprobs"] = logprobs
        return self._chunk({**choice, "finish_reason": None})

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return a call as the client knows it: of a custom tool, if it was one there."""
        function = call["function"]
        if function["name"] not in self._ask.customs:
            return call
        if (text := custom_input(function["arguments"])) is None:
            return call
        custom = {"name": function["name"], "input": text}
        return {"id": call["id"], "type": "custom", "custom": custom}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": result.text if result.text or not result.tool_calls else None,
        }
        if result.reasoning:
            message["reasoning_content"] = result.reasoning
        if result.tool_calls:
            message["tool_calls"] = [self._call(one) for one in result.tool_calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if result.logprobs is None else chat_logprobs(result.logprobs),
            "finish_reason": result.finish_reason.value,
            **stopped(result),
            **warned([result]),
        }


TEXTS = (Channel.PROMPT, Channel.CONTENT)
"""The channels of a streamed completion's text: the prompt comes only if it is to be repeated."""


class CompletionShape(OpenAiShape):
    """`/v1/completions`: one text, whatever its parts are.

    If every chunk has log-probabilities, the text of a token waits for the next token, so that the
    last one has the reason of the end, too.
    """

    PREFIX = "cmpl"
    KIND = "text_completion"
    CHUNK_KIND = "text_completion"

    def piece(self, index: int, delta: Delta) -> bytes | None:
        """Return new text; reasoning and calls of a bare prompt are no part of it."""
        counted = self.counted[index]
        if not self._ask.has_logprobs:
            counted.take(delta)
            text = delta.text if delta.channel in TEXTS else ""
            return self._text(index, text) if text else None
        chunk = None
        if delta.logprobs and counted.lists:
            chunk = self._logged({"index": index, "text": counted.text, "finish_reason": None})
            counted.text, counted.lists = "", LogprobLists()
        self.take(index, delta)
        return chunk

    def take(self, index: int, delta: Delta) -> None:
        """Count it, and hold its text and log-probabilities."""
        counted = self.counted[index]
        offsets = counted.take_text(delta)
        if delta.channel is Channel.PROMPT:
            self.take_prompt(index, delta)
        is_shown = delta.channel is not Channel.PROMPT or self._ask.has_echo
        if self._ask.has_logprobs and is_shown:
            counted.lists.add(delta.logprobs or (), offsets)
        if delta.channel in TEXTS:
            counted.text += delta.text

    def _text(self, index: int, text: str) -> bytes:
        return (
            f'{self.begin},"choices":[{{"index":{index},"text":{encode_basestring(text)},'
            f'"logprobs":null,"finish_reason":null}}]{self.close}'
        ).encode()

    def last(self, index: int, result: Result) -> bytes:
        """Return why it ended, and what was held."""
        return self._logged(self._choice(index, result) | {"text": self.counted[index].text})

    def body(self, results: Sequence[Result]) -> bytes:
        """Return the whole answer as JSON."""
        whole = self.whole(results)
        choices = [self._with_logprobs(choice) for choice in whole.pop("choices")]
        usage = encode(whole.pop("usage"))
        return with_fields(whole, {"choices": f"[{','.join(choices)}]", "usage": usage}).encode()

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """Return one choice without its log-probabilities, which are encoded already."""
        return {
            "index": index,
            "text": (result.prompt if self._ask.has_echo else "") + result.text,
            "finish_reason": result.finish_reason.value,
            **stopped(result),
            **warned([result]),
        }

    def _logged(self, choice: dict[str, Any]) -> bytes:
        return f'{self.begin},"choices":[{self._with_logprobs(choice)}]{self.close}'.encode()

    def _with_logprobs(self, choice: dict[str, Any]) -> str:
        index = choice["index"]
        logprobs = self.counted[index].lists.encoded() if self._ask.has_logprobs else "null"
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
