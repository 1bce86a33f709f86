"""The text side of an MLX model: chat template, tokenizer, detokenizer. Touches no MLX object."""

from __future__ import annotations

import copy
import json
import logging
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.client_messages import CHANGED
from mlxsup.protocol.codec import MAX_TEXT_BYTES
from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid, unfit
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.protocol.states import AnswerForm, Channel
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.text import log_line

from ...engine import BadModelError, Detokenizer, Picture, Prompt
from ...pooling_rows import other_task
from ...text.call_grammars import ANY_ARGUMENTS, BARE, CallForm, TagForm, call_grammar
from ...text.channels import TOOL, ChannelParser, ChannelRules
from ...text.chat_messages import (
    BREAK,
    PICTURE,
    plain_messages,
    text_of_messages,
    with_picture_marks,
    without_media,
    without_special_tokens,
)
from ...text.detokenizer import ByteDetokenizer, WindowDetokenizer
from ...text.fitting import Fitted, Form, Message, find_form, fit, render_or_nothing
from ...text.grammar import (
    LARK,
    Grammar,
    GrammarCompiler,
    HeldCalls,
    NoGrammarsError,
    RowGrammar,
    call_form,
)
from ...text.grammar_tokenizer import make_grammar_tokenizer
from ...text.harmony import CALL_END, ENDS, opening_of
from ...text.tool_calls import ToolCallReader
from .chat_format import chat_format
from .checkpoints import find_checkpoints
from .pictures import NO_TOWER, PictureReader
from .tokenizer import load_tokenizer, tokenizer_error

BYTE_LEVEL = "ByteLevel"

MAX_OPENING = 512
"""How many characters at the end of a prompt are searched for an opening of the answer."""

MAX_RENDERED = 2 * MAX_TEXT_BYTES
"""Characters of a rendered chat: those of the longest body, and as many of the template. A million
takes a tokenizer about a second, and 100 MB of memory."""

CONTINUED = "\ue000continued here\ue001"
"""Stands at the end of a message that the answer continues: the prompt ends there."""

logger = logging.getLogger(__name__)


class MlxText:
    """Renders, tokenises and detokenises; `encode` runs on a helper thread.

    Attributes:
        tokenizer: as mlx-lm loads it.
        in_use: held while the tokenizer is used by a helper thread.
        vocabulary_size: valid ids are below it.
        wants_checkpoints: whether a prompt says how much of it others are likely to share.
        token_bytes: the bytes of each id; None if only the tokenizer can say.
        decoding_tokenizer: the owner thread's, if the tokenizer is needed to decode.
        grammars: the compiled ones.
        pictures: reads those of prompts; None: the model takes text only.
        picture_hint: what the client may do instead of sending a picture.

    Args:
        tokenizer: becomes this one's own.
        vocabulary_size: valid ids are below it.
        decoder: the `decoder` entry of tokenizer.json; empty if there is none.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, *, vocabulary_size: int, decoder: dict[str, Any]
    ) -> None:
        self.tokenizer = tokenizer
        self.in_use = threading.Lock()
        self.vocabulary_size = vocabulary_size
        self.wants_checkpoints = False
        self.pictures: PictureReader | None = None
        self.picture_hint = NO_TOWER
        self.token_bytes: list[bytes] | None = None
        self._strips_first_space = False
        if decoder.get("type") == BYTE_LEVEL:
            self.token_bytes = byte_level_tokens(tokenizer)
        elif (strips := sentencepiece_strips(decoder)) is not None:
            self.token_bytes = sentencepiece_tokens(tokenizer)
            self._strips_first_space = strips
        self._format = chat_format(tokenizer)
        self._forms: dict[bool, Form] = {}  # with tools, and without
        self._special_tokens: re.Pattern[str] | None = None  # of chats; found when one first comes
        self._logged: set[str] = set()
        self.grammars = GrammarCompiler(self.grammar_tokenizer)
        self.decoding_tokenizer: Any = tokenizer
        if self.token_bytes is None:
            # The owner thread decodes while a helper thread encodes, and one tokenizer object
            # refuses to be used by two threads at once.
            self.decoding_tokenizer = copy.deepcopy(self.inner_tokenizer)

    @property
    def inner_tokenizer(self) -> Any:
        """Return the tokenizer of transformers, which mlx-lm has wrapped."""
        return self.tokenizer._tokenizer

    @property
    def stop_tokens(self) -> list[int]:
        """Return the ids that end an answer, from tokenizer and configuration."""
        ends = {int(token) for token in self.tokenizer.eos_token_ids}
        if self._format.is_harmony:
            # Of some conversions the configuration names only the first of them.
            ends.update(map(int, self.tokenizer.convert_tokens_to_ids(list(ENDS))))
        return sorted(ends)

    @property
    def spared_tokens(self) -> list[int]:
        """Return the ids without which an answer could not end: those of end of text and line
        break."""
        line_breaks = self.tokenizer.encode("\n", add_special_tokens=False)
        return sorted({*self.stop_tokens, *map(int, line_breaks)})

    @property
    def channel_rules(self) -> ChannelRules:
        """Return the rules by which the model marks the parts of its answers."""
        return self._format.rules

    def twin(self) -> MlxText:
        """Make a codec for another thread: tokenizers change their own settings while they
        encode."""
        with self.in_use:
            tokenizer = copy.deepcopy(self.tokenizer)
        other = copy.copy(self)
        other.tokenizer = tokenizer
        other.in_use = threading.Lock()
        other.grammars = GrammarCompiler(other.grammar_tokenizer)
        return other

    def encode(self, body: RequestBody) -> Prompt:
        """Encode the prompt of a request.

        Raises:
            RemoteError: `invalid_request`, the request's own fault (G6, C7).
        """
        with self.in_use:
            return self._encode(body)

    def _encode(self, body: RequestBody) -> Prompt:
        if body.messages is not None:
            prompt = self._encode_messages(body)
        else:
            tokens = body.prompt_tokens
            if tokens is None:
                is_special = body.tokenizes("add_special_tokens")
                tokens = self._encode_text(body.prompt or "", may_add=is_special)
            prompt = Prompt(tokens=list(tokens), opening=self._raw_opening(tokens))
        tokens = prompt.tokens
        if not tokens and body.tokenize is None:
            raise invalid("prompt", "text of at least one token", shown="text of none")
        if (largest := max(tokens, default=0)) >= self.vocabulary_size:
            below = f"ids below this model's vocabulary of {self.vocabulary_size}"
            if body.prompt_tokens is not None:
                raise invalid("prompt_tokens", below, largest)
            sent = "prompt" if body.messages is None else "messages"
            made_of = self._decoded(self.inner_tokenizer, [largest])
            raise unfit(
                sent,
                f"{sent}: this model takes {below}, but its tokenizer makes {largest} of"
                f" {made_of[:64]!r}: leave that out",
            )
        return prompt

    def encode_texts(self, body: PoolingBody) -> Prompt:
        """See `TextCodec.encode_texts`: this model writes text."""
        raise other_task(Task.GENERATE, Task.EMBED if body.query is None else Task.RERANK)

    def prompt_text(self, body: RequestBody, tokens: Sequence[int]) -> str:
        """See `TextCodec.prompt_text`."""
        if body.prompt is not None:
            return body.prompt
        if self.token_bytes is None:
            with self.in_use:
                return self._decoded(self.inner_tokenizer, tokens)
        known = len(self.token_bytes)
        content = b"".join(self.token_bytes[token] for token in tokens if token < known)
        text = content.decode(errors="replace")
        return text.removeprefix(" ") if self._strips_first_space else text

    def constrain(self, body: RequestBody, prompt: Prompt) -> Prompt:
        """See `TextCodec.constrain`."""
        strict = None
        if body.strict_tools:
            with suppress(NoGrammarsError):  # the answer has a warning then
                strict = self.grammars.strict_schemas(body.strict_tools)
        grammar: RowGrammar | None = None
        if body.form is not AnswerForm.TEXT:
            grammar = self._grammar(body, prompt.opening)
        elif strict is not None:
            grammar = self._held_calls(body, prompt.opening)
        return replace(prompt, grammar=grammar, strict=strict)

    def _calls(self, body: RequestBody, forms: Sequence[CallForm | TagForm]) -> Any:
        """Return llguidance's matcher for a call in one of these forms; None if there is none."""
        tokenizer = self.grammars.tokenizer
        special = {
            mark: token
            for mark, token in self.tokenizer.get_added_vocab().items()
            if token < self.vocabulary_size and tokenizer.is_special_token(token)
        }
        schemas = dict(call_form(body.strict_tools)["tools"])
        names = [one["function"]["name"] for one in body.callable_tools]
        tools = [(name, schemas.get(name, ANY_ARGUMENTS)) for name in names]
        lark = call_grammar(forms, tools, ends=self._ends_of_calls, special=special)
        try:
            return self.grammars.matcher({"type": LARK, LARK: lark}, "tools") if lark else None
        except RemoteError:  # the schemas are right, but not in this form: they are checked
            return None

    @property
    def _ends_of_calls(self) -> list[str]:
        return [mark for mark, _ in self._format.rules.transitions.get(TOOL, ())]

    def _held_calls(self, body: RequestBody, opening: str) -> HeldCalls | None:
        """Return the grammar of the calls in a free answer; None if the model's family has none."""
        rules = self._format.rules
        marked = self._calls(body, rules.tool_format.forms)
        bare = self._calls(body, (BARE,)) if rules.tool_format.has_bare_calls else None
        if marked is None and bare is None:
            return None
        return HeldCalls(
            marked=marked,
            bare=bare,
            watch=ChannelParser(rules, opening, ToolCallReader(body.callable_tools, 0)),
            detokenizer=self.detokenizer(),
            tokenizer=self.grammars.tokenizer,
            is_last=rules.header is not None or not self._ends_of_calls,
        )

    def _grammar(self, body: RequestBody, opening: str) -> Grammar:
        """Compile the grammar that the content of an answer must follow, from where it begins.

        Raises:
            RemoteError: `invalid_request`; no answer can follow it.
        """
        parser = ChannelParser(
            self._format.rules, opening, ToolCallReader(None, 0), form=AnswerForm.REGEX
        )
        begins_after = () if parser.is_in_content else self._format.content_after
        form = body.response_format or {}
        if body.form is AnswerForm.CALL:
            form = call_form(body.callable_tools)
        # A call that gpt-oss makes in a part of its own ends there.
        calls = {CALL_END} if self._format.is_harmony and body.callable_tools else set()
        ends = set(self.stop_tokens) - set(self.tokenizer.convert_tokens_to_ids(list(calls)))
        marks = self._marks_of_calls() if body.may_call else []
        has_bare_calls = body.may_call and self._format.rules.tool_format.has_bare_calls
        bare_call = self._calls(body, (BARE,)) if has_bare_calls else None
        return self.grammars.compile(form, begins_after, sorted(ends), marks, bare_call)

    def _marks_of_calls(self) -> list[list[int]]:
        """Return the ids of each text that begins a call in the content."""
        marks = self._format.rules.call_marks
        ids = [list(self.tokenizer.encode(mark, add_special_tokens=False)) for mark in marks]
        return [one for one, mark in zip(ids, marks, strict=True) if self.decode(one) == mark]

    def grammar_tokenizer(self) -> Any:
        """llguidance's view of the vocabulary.

        Raises:
            RemoteError: `invalid_request`; it cannot make one of this tokenizer.
        """
        try:
            with self.in_use:
                return make_grammar_tokenizer(
                    self.inner_tokenizer,
                    vocabulary_size=self.vocabulary_size,
                    end_tokens=self.stop_tokens or [self._unused_token()],
                )
        except ValueError as error:
            raise NoGrammarsError(
                ErrorCode.INVALID_REQUEST,
                f"response_format does not work with this model's tokenizer: {str(error)[:200]}",
                detail={"parameter": "response_format"},
            ) from None

    def _unused_token(self) -> int:
        """Return an id for the end of text if the model has none: llguidance would take 0, which
        may be a character. The byte 255 is in no text."""
        token_bytes = self.token_bytes or []
        return token_bytes.index(b"\xff") if b"\xff" in token_bytes else self.vocabulary_size - 1

    def detokenizer(self) -> Detokenizer:
        """Make a detokenizer for one answer."""
        if self.token_bytes is not None:
            return ByteDetokenizer(self.token_bytes, strips_first_space=self._strips_first_space)
        return WindowDetokenizer(self.decode)

    def token_alone(self, token: int) -> tuple[str, bytes]:
        """See `TextCodec.token_alone`."""
        if self.token_bytes is None:
            return self.decode([token]), b""
        if not 0 <= token < len(self.token_bytes):
            return "", b""
        content = self.token_bytes[token]
        try:
            return content.decode(), b""
        except UnicodeDecodeError:
            return content.decode(errors="replace"), content

    def decode(self, tokens: list[int]) -> str:
        """Decode all tokens at once, special ones included."""
        return self._decoded(self.decoding_tokenizer, tokens)

    @staticmethod
    def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False))

    def _encode_text(self, text: str, *, may_add: bool = True) -> list[int]:
        # A prompt that already begins with the begin-of-text token must not get a second one.
        bos = self.tokenizer.bos_token
        adds_special_tokens = may_add and (bos is None or not text.startswith(bos))
        return list(self.tokenizer.encode(text, add_special_tokens=adds_special_tokens))

    def _raw_opening(self, tokens: Sequence[int]) -> str:
        """Return what opens an answer to a prompt of which the template's part is not known.

        Only a marker at the very end of the prompt, by the caller, opens a part: one further up
        is part of the text.
        """
        if not self._format.is_harmony and self._format.reasoning is None:
            return ""
        tail = str(self.tokenizer.decode(list(tokens[-MAX_OPENING // 4 :])))
        if self._format.is_harmony:
            return opening_of(tail)
        begin = (self._format.reasoning or ("",))[0]
        return begin if tail.rstrip().endswith(begin) else ""

    def _encode_messages(self, body: RequestBody) -> Prompt:
        """Return the prompt of a chat.

        Only what the template adds opens a part: markers in the messages are their authors' text.
        """
        said = list(body.messages or ())
        files: list[tuple[str, bytes]] = []
        if self.pictures is not None:
            said, files = with_picture_marks(said)
        said, changes = without_media(said, self.picture_hint)
        if files and body.shows_prompt and body.tokenize is None:
            raise unfit("messages", "a prompt with pictures cannot be shown: leave out echo and"
                        " prompt_logprobs")  # fmt: skip
        if not self.tokenizer.has_chat_template:
            tokens = self._encode_text(text_of_messages(replace(body, messages=said)))
            begins = self._raw_opening(tokens)
            return Prompt(tokens=tokens, opening=begins, warnings=self._told(changes))
        chat = plain_messages(said, self._format.rules.tool_format.call_ids)
        extra = dict(body.chat_template_kwargs or {})
        if body.offered_tools:
            extra["tools"] = body.offered_tools
        form = self._form(body.offered_tools)
        chat = without_special_tokens(chat, self._broken)

        def render(messages: list[Message], *, opens: bool) -> str:
            return self._render(form.of(messages), extra, opens=opens)

        is_continued = body.continues and bool(chat[-1]["content"])
        if is_continued:
            chat[-1] = chat[-1] | {"content": chat[-1]["content"] + CONTINUED}
        try:
            fitted = fit(chat, lambda messages: render(messages, opens=not is_continued))
            closed = _rendered_before(fitted, render, is_continued=is_continued)
        except MemoryError:
            raise
        except Exception as error:
            # A template is the model's program run on the request's data: whatever it raises is
            # that request's own error (G6).
            raise RemoteError(
                ErrorCode.INVALID_REQUEST,
                f"the model's chat template refuses these messages: {str(error)[:200]}",
                detail={"parameter": "messages"},
            ) from error
        rendered = fitted.rendered
        opening = rendered[len(closed) :] if rendered.startswith(closed) else None
        if is_continued:
            rendered = _cut(rendered)
            opening = self._opening_of_rest(fitted, rendered, closed)
        elif not body.tokenizes("add_generation_prompt"):
            rendered = closed
        pictures: tuple[Picture, ...] = ()
        if files:
            rendered = self._shown(rendered, len(files))
        tokens = self._encode_rendered(rendered)
        checkpoints: tuple[int, ...] = ()
        if self.wants_checkpoints and body.tokenize is None:
            checkpoints = find_checkpoints(
                fitted.messages,
                rendered,
                tokens,
                render=lambda messages: self._shown(render(messages, opens=True)),
                encode=self._encode_rendered,
                special_tokens=list(self.tokenizer.get_added_vocab()),
            )
        if files and self.pictures is not None:
            read = self.pictures.read_all(files, counts=body.tokenize is not None)
            tokens, pictures, moved = self.pictures.place(tokens, read)
            checkpoints = tuple(map(moved, checkpoints))
        return Prompt(
            tokens=tokens,
            opening=self._raw_opening(tokens) if opening is None else opening[-MAX_OPENING:],
            checkpoints=checkpoints,
            warnings=self._told((*changes, *fitted.changes)),
            pictures=pictures,
        )

    def _shown(self, rendered: str, count: int | None = None) -> str:
        """Return a rendered chat with its pictures as the model marks them.

        Args:
            rendered: with `PICTURE` for each.
            count: how many there must be.

        Raises:
            RemoteError: `invalid_request`; the template has left some out, or shows one twice.
        """
        if count is not None and (found := rendered.count(PICTURE)) != count:
            raise unfit(
                "messages",
                f"the model's chat template shows {found} of the {count} pictures: send them in"
                " messages of the user",
            )
        return (
            rendered
            if self.pictures is None
            else rendered.replace(PICTURE, self.pictures.placeholder)
        )

    def _opening_of_rest(self, fitted: Fitted, prompt: str, closed: str) -> str | None:
        """Return what opens the rest of a message: what the template puts before the message, and
        the marker that says in which part the message breaks off; None if it is not known.

        The client's beginning of the answer may open a part, as the model may.
        """
        said = fitted.messages[-1]["content"].removesuffix(CONTINUED)
        if not prompt.startswith(closed) or not prompt.endswith(said):
            return None
        head = prompt[len(closed) : len(prompt) - len(said)][-MAX_OPENING:]
        if self._format.reasoning is None:
            return head
        before, after = self._channel_after(head), self._channel_after(head + said)
        if before is after:
            return head
        return head + self._format.reasoning[0 if after is Channel.REASONING else 1]

    def _channel_after(self, text: str) -> Channel:
        return ChannelParser(self._format.rules, text, ToolCallReader(None, 0)).channel

    def _form(self, tools: Any) -> Form:
        """Return the form of messages that the template reads."""
        has_tools = bool(tools)
        if has_tools not in self._forms:
            extra = {"tools": [_SOME_TOOL]} if has_tools else {}
            call_ids = self._format.rules.tool_format.call_ids
            self._forms[has_tools] = find_form(
                lambda messages: self._render(messages, extra, opens=False),
                call_ids.make("probe", 0, ""),
            )
        return self._forms[has_tools]

    def _broken(self, text: str) -> str:
        """Return a text with `BREAK` in each special token."""
        if self._special_tokens is None:
            self._special_tokens = re.compile(any_of(self._names_of_special_tokens()))
        return self._special_tokens.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)

    def _names_of_special_tokens(self) -> list[str]:
        """Return the names of the tokens that a text must not forge: those that the tokenizer calls
        special, and those with which the template marks turns: of DeepSeek they are ordinary."""
        added = self.inner_tokenizer.added_tokens_decoder.values()
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        shown = render_or_nothing(
            lambda messages: self._render(messages, {}, opens=True), self._form(None).of(turns)
        )
        names = {str(token) for token in added if token.special or str(token) in shown}
        # Gemma's line breaks are added tokens, too.
        return [name for name in names if len(name) > 1 and any(map(str.isalnum, name))]

    def _told(self, changes: Sequence[str]) -> tuple[str, ...]:
        """Return what was changed, as warnings; each kind is logged once."""
        for change in changes:
            if change not in self._logged:
                self._logged.add(change)
                logger.warning(log_line("chat changed for the model's template", change=change))
        return tuple(CHANGED + change for change in changes)

    def read_pictures(self, processor: Any, context: int) -> None:
        """Take pictures from now on, with the model's processor, as many as the context holds."""
        self.pictures = PictureReader(
            processor,
            self._encode_rendered,
            lambda messages: self._render(messages, {}, opens=False),
            context,
        )

    def _encode_rendered(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in text.split(BREAK):
            tokens += self.tokenizer.encode(piece, add_special_tokens=False)
        return tokens

    def _render(self, messages: list[Message], extra: dict[str, Any], *, opens: bool) -> str:
        rendered = str(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=opens, tokenize=False, **extra
            )
        )
        if len(rendered) > MAX_RENDERED:
            raise ValueError(f"it writes {len(rendered):,} characters, more than {MAX_RENDERED:,}")
        try:
            rendered.encode()
        except UnicodeEncodeError:
            raise ValueError("it writes half a surrogate pair, which is no character") from None
        return rendered


_SOME_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {"type": "object"}},
}


def _rendered_before(fitted: Fitted, render: Callable[..., str], *, is_continued: bool) -> str:
    """Return what a template makes of everything before the answer, or before the message that it
    continues."""
    if not is_continued:
        return render(fitted.messages, opens=False)
    try:
        return render(fitted.messages[:-1], opens=False) if fitted.messages[1:] else ""
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  the template has taken the whole chat
        return ""


def _cut(rendered: str) -> str:
    """Return a prompt up to the end of the message that the answer continues.

    Raises:
        RemoteError: `invalid_request`; the template does not show that end.
    """
    prompt, mark, rest = rendered.partition(CONTINUED)
    if not mark or CONTINUED in rest:
        raise RemoteError(
            ErrorCode.INVALID_REQUEST,
            "the last message is the assistant's, and the model's chat template cannot continue it:"
            " end with the user, or send continue_final_message false",
            detail={"parameter": "messages"},
        )
    return prompt


def load_text(folder: Path, *, eos_token_ids: Any, vocabulary_size: int | None) -> MlxText:
    """Loads a folder's tokenizer.

    Args:
        folder: has passed `check_folder`.
        eos_token_ids: of the model's configuration: an id, a list of them, or None.
        vocabulary_size: of the model; None for the tokenizer's own.

    Raises:
        BadModelError: the tokenizer cannot be used; names the file.
        MemoryError: not enough memory now.
    """
    path = folder / "tokenizer.json"
    try:
        decoder = json.loads(path.read_bytes()).get("decoder") if path.exists() else None
        tokenizer = load_tokenizer(folder, eos_token_ids)
        size = vocabulary_size or len(tokenizer)
        return MlxText(tokenizer, vocabulary_size=size, decoder=decoder or {})
    except (BadModelError, MemoryError):
        raise
    except Exception as error:
        # Libraries run on what the files say: whatever they raise, these files cannot be used (B6).
        raise tokenizer_error(folder, error) from error


def any_of(names: Sequence[str]) -> str:
    """Return an expression for any of these texts, the longest first.

    What several begin with is there once: there may be hundreds of special tokens, and a text of
    one `<` after the other.
    """
    if not names:
        return "(?!)"
    first, last = min(names), max(names)
    pairs = enumerate(zip(first, last, strict=False))
    shared = next((place for place, (one, other) in pairs if one != other), len(first))
    rests: dict[str, list[str]] = {}
    for name in names:
        rests.setdefault(name[shared : shared + 1], []).append(name[shared:])
    is_whole = rests.pop("", None) is not None
    begin = re.escape(first[:shared])
    if not rests:
        return begin
    more = "|".join(map(any_of, rests.values()))
    return f"{begin}(?:{more}){'?' if is_whole else ''}"


def byte_level_tokens(tokenizer: TokenizerWrapper) -> list[bytes]:
    """Return the bytes of each id; an entry outside the byte alphabet (an added token) is plain
    text."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    byte_of = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    byte_of |= {chr(256 + number): byte for number, byte in enumerate(hidden)}
    result = []
    for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))):
        text = token or ""
        if all(character in byte_of for character in text):
            result.append(bytes(byte_of[character] for character in text))
        else:
            result.append(text.encode("utf-8", "replace"))
    return result


def sentencepiece_tokens(tokenizer: TokenizerWrapper) -> list[bytes]:
    """Return the bytes of each id of a vocabulary that spells single bytes out, as `<0x0A>`."""
    result = []
    for token in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))):
        text = token or ""
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            result.append(bytes.fromhex(text[3:5]))
        else:
            result.append(text.replace("\u2581", " ").encode("utf-8", "replace"))
    return result


def sentencepiece_strips(decoder: dict[str, Any]) -> bool | None:
    """True if a sentencepiece decoder strips the first space; None if it is another decoder."""
    steps = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(steps, list):
        return None
    kinds = [step.get("type") for step in steps if isinstance(step, dict)]
    replaces = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or steps[0] != replaces:
        return None
    if len(steps) == 3:
        return False
    is_strip = steps[3:] == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
    return True if is_strip else None
