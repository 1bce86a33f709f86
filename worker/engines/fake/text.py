"""The fake engine's text side: one token per byte of UTF-8, and directives inside prompts.

A token id is a byte plus `BYTE_OFFSET`, so that a character of several bytes is split over tokens
as real tokenizers do it. Chats are rendered as lines of `role: content` with a last `assistant:`.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.pooling import PoolingBody, pack_vector
from mlxsup.protocol.tasks import Task

from ...engine import Prompt, RowLogprobs, TextCodec
from ...pooling_rows import check_lengths, other_task
from ...text.channels import NORMAL, REASONING, TOOL, ChannelRules
from ...text.chat_messages import without_media
from ...text.detokenizer import ByteDetokenizer
from ...text.tool_formats import ToolFormat, parse_json_calls
from .options import STALLS, FakeOptionError, check_crash, stall

BYTE_OFFSET = 3
VOCABULARY_SIZE = 256 + BYTE_OFFSET

BIG_TOKEN_BASE = 1 << 20
"""Tokens from this id on are shown as (id - base) letters: how `big` makes large deltas."""

UNIT_BYTES = 8
UNITS = tuple(
    word.encode().ljust(UNIT_BYTES)
    for word in (
        "tide",
        "größe",
        "lantern",
        "日本",
        "amber",
        "🦊",
        "harbour",
        "café",
        "moss",
        "Ωmega",
    )
)

CHOICES = {
    "stall": STALLS,
    "during": ("step", "insert", "remove", "bytes_held"),
    "frames": ("garbage", "oversized"),
    "link": ("drop",),
    "beats": ("end",),
    "row": ("lost",),
    "token": ("other",),
}
"""The values that some faults take."""

DIRECTIVE = re.compile(r"\[\[(fault|answer|say|tokenize)\b ?(.*?)\]\]", re.DOTALL)


def encode_text(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [byte + BYTE_OFFSET for byte in text.encode()]


def decode_tokens(tokens: Sequence[int]) -> str:
    """Return the text of token ids; bytes that are not UTF-8 become replacement characters."""
    detokenizer = FakeDetokenizer()
    return "".join(map(detokenizer.add, tokens)) + detokenizer.finish()


def text_vector(tokens: Sequence[int], voice: str, task: Task, dimensions: int) -> bytes:
    """Compute the vector of a text from its bytes and the model's voice alone."""
    digest = prompt_digest(tokens, voice)
    if task is Task.RERANK:
        return pack_vector([digest[0] / 256])
    return pack_vector([(byte - 127.5) / 512 for byte in digest][: dimensions or len(digest)])


def prompt_digest(prompt: Sequence[int], voice: str = "") -> bytes:
    """Return the digest of a prompt and its model, on which an answer depends.

    Args:
        prompt: its tokens.
        voice: the model's voice, at most `fake_options.MAX_VOICE_BYTES`.
    """
    return hashlib.blake2b(pack_tokens(prompt), digest_size=16, key=voice.encode()).digest()


def answer_token(prompt: bytes, index: int, seed: int | None) -> int:
    """Token `index` of the answer to a prompt: nothing else goes into it.

    Args:
        prompt: the prompt's digest.
        index: the token's number, from 0.
        seed: a sampled answer's seed; None for a greedy one.
    """
    unit_name = f"{seed}:{index // UNIT_BYTES}".encode()
    digest = hashlib.blake2b(unit_name, digest_size=4, key=prompt).digest()
    unit = UNITS[int.from_bytes(digest) % len(UNITS)]
    return unit[index % UNIT_BYTES] + BYTE_OFFSET


def answer_tokens(
    prompt: Sequence[int], count: int, seed: int | None = None, voice: str = ""
) -> list[int]:
    """Return the first `count` tokens of an answer, for tests to compare with (canaries)."""
    digest = prompt_digest(prompt, voice)
    return [answer_token(digest, index, seed) for index in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directives:
    """What a prompt asks of the fake engine; see the module docstring of `fake_engine`."""

    crash: str = ""
    exception: bool = False
    stall: str = ""
    during: str = "step"
    frames: str = ""
    link: str = ""
    beats: str = ""
    row: str = ""
    token: str = ""
    at: int = 1
    generation: int = 0
    rank: int = 0
    big: int = 0
    slow: float = 0.0
    answer: int | None = None
    say: str = ""
    tokenize: str = ""

    @classmethod
    def parse(cls, text: str) -> Directives:
        """Reads every directive in a prompt.

        Raises:
            FakeOptionError: one is unknown or wrong.
        """
        values: dict[str, object] = {}
        for kind, argument in DIRECTIVE.findall(text):
            if kind == "answer":
                values["answer"] = _integer("answer", argument)
            elif kind == "fault":
                values |= _parse_fault(argument)
            else:
                values[kind] = argument
        return cls(**values)  # type: ignore[arg-type]


def _parse_fault(argument: str) -> dict[str, object]:
    known = {f.name for f in fields(Directives)} - {"answer", "say", "tokenize", "exception"}
    values: dict[str, object] = {}
    for word in argument.split():
        name, _, value = word.partition("=")
        if name == "raise":
            values["exception"] = True
        elif name not in known:
            raise FakeOptionError(f"no fault {name!r}; known are raise, {', '.join(sorted(known))}")
        elif name in ("at", "generation", "rank", "big"):
            values[name] = _integer(name, value)
        elif name == "slow":
            values[name] = _seconds(name, value)
        else:
            values[name] = value
    if crash := values.get("crash"):
        check_crash("crash", str(crash))
    for name, choices in CHOICES.items():
        if values.get(name, choices[0]) not in choices:
            raise FakeOptionError(f"{name} takes {_one_of(choices)}")
    return values


def _one_of(choices: Sequence[str]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _integer(name: str, value: str) -> int:
    if not value.strip().isdigit():
        raise FakeOptionError(f"{name} must be an integer of 0 or more, not {value!r}")
    return int(value)


def _seconds(name: str, value: str) -> float:
    try:
        return max(0.0, float(value))
    except ValueError:
        raise FakeOptionError(f"{name} must be seconds, not {value!r}") from None


TOKEN_BYTES = [b""] * BYTE_OFFSET + [bytes([byte]) for byte in range(256)]


class FakeDetokenizer(ByteDetokenizer):
    """Bytes to text, and large tokens to many letters."""

    def __init__(self) -> None:
        super().__init__(TOKEN_BYTES)

    def add(self, token: int) -> str:
        """See `Detokenizer.add`."""
        if token >= BIG_TOKEN_BASE:
            return self.finish() + "x" * (token - BIG_TOKEN_BASE)
        return super().add(token)


class FakeTextCodec(TextCodec):
    """See `TextCodec`.

    Args:
        tokenize_s: how long every preparation takes.
        task: what the model is for.
        context_length: of a text that is embedded or ranked.
    """

    def __init__(
        self,
        tokenize_s: float = 0.0,
        task: Task = Task.GENERATE,
        context_length: int = 4096,
        *,
        takes_pictures: bool = False,
    ) -> None:
        self._tokenize_s = tokenize_s
        self._task = task
        self._context_length = context_length
        self._takes_pictures = takes_pictures

    def twin(self) -> FakeTextCodec:
        """See `TextCodec.twin`."""
        return FakeTextCodec(
            self._tokenize_s,
            self._task,
            self._context_length,
            takes_pictures=self._takes_pictures,
        )

    def encode(self, body: RequestBody) -> Prompt:
        """See `TextCodec.encode`; wrong directives are the request's own error."""
        if self._task is not Task.GENERATE and body.tokenize is None:
            raise other_task(self._task, Task.GENERATE)
        if self._tokenize_s > 0:
            time.sleep(self._tokenize_s)
        changes: tuple[str, ...] = ()
        if body.prompt_tokens is not None:
            tokens = body.prompt_tokens
            if max(tokens, default=0) >= VOCABULARY_SIZE:
                raise RemoteError(
                    ErrorCode.INVALID_REQUEST,
                    f"prompt_tokens must be ids below {VOCABULARY_SIZE}, not {max(tokens)}",
                    detail={"parameter": "prompt_tokens"},
                )
            text = decode_tokens(tokens)
        else:
            messages = body.messages or []
            if not self._takes_pictures:
                messages, changes = without_media(messages)
            text = body.prompt if body.prompt is not None else _render(body, messages)
            tokens = encode_text(text)
        try:
            self._obey(Directives.parse(text).tokenize)
        except FakeOptionError as error:
            raise RemoteError(ErrorCode.INVALID_REQUEST, str(error)) from None
        is_thinking = text.endswith("<think>")
        opening = "<think>" if is_thinking else ""
        return Prompt(tokens=tokens, opening=opening, warnings=changes)

    def encode_texts(self, body: PoolingBody) -> Prompt:
        """See `TextCodec.encode_texts`; a document comes after its query."""
        asked = Task.EMBED if body.query is None else Task.RERANK
        if self._task is not asked:
            raise other_task(self._task, asked)
        if self._tokenize_s > 0:
            time.sleep(self._tokenize_s)
        begin = encode_text(body.query or "")
        texts = [begin + (encode_text(t) if isinstance(t, str) else t) for t in body.texts]
        if body.truncate:
            texts = [text[: self._context_length] for text in texts]
        lengths = [len(text) for text in texts]
        check_lengths(lengths, body, self._context_length)
        return Prompt(tokens=[token for text in texts for token in text], lengths=tuple(lengths))

    @property
    def channel_rules(self) -> ChannelRules:
        """See `TextCodec.channel_rules`; as many models have them."""
        return ChannelRules(
            transitions={
                NORMAL: (("<think>", REASONING), ("<tool_call>", TOOL)),
                REASONING: (("</think>", NORMAL),),
                TOOL: (("</tool_call>", NORMAL),),
            },
            tool_format=ToolFormat(name="fake", parse=parse_json_calls),
        )

    def prompt_text(self, body: RequestBody, tokens: Sequence[int]) -> str:
        """See `TextCodec.prompt_text`."""
        return decode_tokens(tokens) if body.prompt is None else body.prompt

    def detokenizer(self) -> FakeDetokenizer:
        """See `TextCodec.detokenizer`."""
        return FakeDetokenizer()

    def token_alone(self, token: int) -> tuple[str, bytes]:
        """See `TextCodec.token_alone`."""
        byte = token - BYTE_OFFSET
        return decode_tokens([token]), bytes([byte]) if 128 <= byte < 256 else b""

    @staticmethod
    def _obey(how: str) -> None:
        name, _, value = how.partition("=")
        match name:
            case "":
                pass
            case "raise":
                raise KeyError("a template raised this on demand")
            case "slow":
                time.sleep(_seconds("slow", value))
            case "loop":
                stall("busy")
            case _:
                raise FakeOptionError(f"tokenize must be raise, loop or slow=SECONDS, not {how!r}")


def _render(body: RequestBody, messages: Sequence[dict[str, Any]]) -> str:
    lines = [f"{message['role']}: {_shown(message.get('content'))}" for message in messages]
    return "\n".join(lines + ["assistant:"] * body.tokenizes("add_generation_prompt"))


def _shown(content: Any) -> str:
    """Return a content as text; a picture is the length of its file."""
    if not isinstance(content, list):
        return str(content or "")
    return "".join(
        f"[{len(part['data'])} bytes]" if part["type"] == "image" else part["text"]
        for part in content
    )


def token_logprobs(token: int, count: int | None) -> RowLogprobs | None:
    """Make logprobs in which each id is half as likely as the one before it, from the token on."""
    if count is None:
        return None
    ids = [(token + place) % VOCABULARY_SIZE for place in range(count)]
    top = [(one, (place + 1) * -math.log(2)) for place, one in enumerate(ids)]
    return RowLogprobs(logprob=-math.log(2), top=top)
