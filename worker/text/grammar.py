"""Answers that follow a JSON schema or a regular expression, through llguidance. No MLX here.

llguidance comes with the extra `structured`; it is imported when a request first asks for it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError, invalid

MAX_KEPT = 32
"""How many compiled grammars to keep; a large one takes a second to compile."""

MAX_CHOICES = 20_000
"""How much may come next at one place in a format: properties of an object, for example."""

FREE_STEPS = 2
WALKED_TOKENS = 16
"""How far a format is tried before the request is accepted: any first tokens, then forced ones."""

NO_WHITESPACE = {"whitespace_flexible": False}


class Grammar:
    """The state of one answer; every method is safe whatever the model has written.

    Args:
        matcher: llguidance's, in its initial state.
        end_tokens: ids that it allows when the answer may end.
        begins_after: sequences of ids; the grammar applies once all have appeared, in this order.
            The end of the reasoning, for example; empty: at once.
    """

    def __init__(
        self,
        matcher: Any,
        end_tokens: Sequence[int],
        begins_after: Sequence[Sequence[int]] = (),
    ) -> None:
        self._matcher = matcher
        self._end_tokens = frozenset(end_tokens)
        self._end_bits = sum(1 << token for token in self._end_tokens)
        self._begins_after = [list(ids) for ids in begins_after]
        self._latest: list[int] = []
        self._can_only_end = False

    @property
    def is_over(self) -> bool:
        """Whether the answer is complete: nothing more can follow."""
        return not self._begins_after and (self._can_only_end or bool(self._matcher.is_stopped()))

    @property
    def has_begun(self) -> bool:
        """Whether the part of the answer that must follow it has begun."""
        return not self._begins_after

    @property
    def error(self) -> str:
        """Why the matcher gave up, which ends the answer; empty if it did not."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    @property
    def refusal(self) -> RemoteError | None:
        """The request's error if the matcher gave up; None if it did not."""
        if not self.error:
            return None
        return RemoteError(
            ErrorCode.INVALID_REQUEST,
            "the answer cannot continue within its response_format, which is too complex:"
            f" {self.error}",
            detail={"parameter": "response_format"},
        )

    def is_end(self, token: int) -> bool:
        """Whether this token ended the answer, and is not part of it."""
        return self.is_over and token in self._end_tokens

    def accept(self, token: int) -> None:
        """Takes the next token of the answer."""
        if not self._begins_after:
            if not self.is_over:
                self._matcher.consume_token(token)
            return
        wanted = self._begins_after[0]
        self._latest = [*self._latest, token][-len(wanted) :]
        if self._latest == wanted:
            del self._begins_after[0]
            self._latest = []

    def mask(self) -> bytes | None:
        """The tokens that may follow, one bit each, the lowest first; None for any."""
        if self._begins_after or self.is_over:
            return None
        mask = bytes(self._matcher.compute_bitmask())
        # Not every tokenizer has an end-of-text token that could be drawn instead.
        self._can_only_end = not int.from_bytes(mask, "little") & ~self._end_bits
        return None if self._can_only_end else mask


class GrammarCompiler:
    """Compiles the grammars that requests ask for, and keeps them; lives on a helper thread.

    Args:
        make_tokenizer: llguidance's view of the model's vocabulary, which takes a second to make.
    """

    def __init__(self, make_tokenizer: Callable[[], Any]) -> None:
        self._make_tokenizer = make_tokenizer
        self._tokenizer: Any = None
        self._matchers: OrderedDict[str, Any] = OrderedDict()

    def compile(
        self,
        response_format: dict[str, Any] | None,
        begins_after: Sequence[Sequence[int]] = (),
    ) -> Grammar | None:
        """The grammar of one answer; None if any text will do.

        Raises:
            RemoteError: `invalid_request`: it is impossible, too complex, or llguidance is not
                installed.
        """
        if response_format is None or response_format["type"] == "text":
            return None
        try:
            key = json.dumps(response_format, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise _impossible(str(error)) from None
        matcher = self._matchers.pop(key, None)
        if matcher is None:
            matcher = self._compile(response_format)
        self._matchers[key] = matcher
        while len(self._matchers) > MAX_KEPT:
            self._matchers.popitem(last=False)
        return Grammar(matcher.deep_copy(), self._tokenizer.eos_tokens, begins_after)

    def _compile(self, response_format: dict[str, Any]) -> Any:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise RemoteError(
                ErrorCode.INVALID_REQUEST,
                "response_format needs llguidance: install mlxsup[structured]",
                detail={"parameter": "response_format"},
            ) from None
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        try:
            matcher = LLMatcher(
                self._tokenizer,
                _grammar_text(response_format),
                log_level=0,
                limits=LLParserLimits(max_items_in_row=MAX_CHOICES),
            )
        except ValueError as error:
            raise _impossible(str(error)) from None
        if matcher.is_error():
            raise _impossible(matcher.get_error())
        probe = Grammar(matcher.deep_copy(), self._tokenizer.eos_tokens)
        if probe.mask() is None:
            raise _impossible(probe.error or "it only allows the empty answer")
        _walk_ahead(probe)
        return matcher


def _grammar_text(response_format: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    if response_format["type"] == "regex":
        return str(LLMatcher.grammar_from_regex(response_format["regex"]))
    schema: Any = {"type": "object"}
    if response_format["type"] == "json_schema":
        schema = response_format["json_schema"]["schema"]
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=NO_WHITESPACE))  # type: ignore[arg-type]


def _walk_ahead(probe: Grammar) -> None:
    """Goes where every answer must go: a format that breaks there is refused before it begins.

    Raises:
        RemoteError: `invalid_request`.
    """
    for step in range(WALKED_TOKENS):
        mask = probe.mask()
        if probe.error:
            raise _impossible(probe.error)
        allowed = int.from_bytes(mask or b"", "little")
        if not allowed or (step >= FREE_STEPS and allowed.bit_count() > 1):
            return
        probe.accept((allowed & -allowed).bit_length() - 1)


def _first_line(text: object) -> str:
    """What llguidance says, without the state of its parser."""
    return " ".join(str(text).split("<state>")[0].split())


def _impossible(why: str) -> RemoteError:
    why = _first_line(why)[:300]
    if "NoExtensionBias" in why or not why:
        why = "nothing can match it"
    return invalid("response_format", "a format that an answer can have", shown=f"this: {why}")
