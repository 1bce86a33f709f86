"""Answers that follow a JSON schema or a regular expression, or are a call, through llguidance.
No MLX here.

llguidance is imported when a request first asks for it.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from mlxsup.protocol.errors import ErrorCode, RemoteError, unfit

from .channels import ChannelParser
from .tool_values import in_order

MAX_KEPT = 32
"""How many compiled grammars to keep; a large one takes a second to compile."""

MAX_PATTERNS = 256
"""Patterns that are remembered as readable or not: checking a large one takes milliseconds."""

MAX_CHOICES = 20_000
"""How much may come next at one place in a format: properties of an object, for example."""

FREE_STEPS = 2
WALKED_TOKENS = 16
"""How far a format is tried before the request is accepted: any first tokens, then forced ones."""

MAX_WARNING = 300
"""Characters of what a warning says that is not enforced."""

DENSE = {"whitespace_flexible": False, "lenient": True}
"""No white space. Keywords and formats that llguidance does not know, such as `uniqueItems`, are
left out, not refused: the schemas of pydantic and zod have them."""

AS_TEMPLATES = DENSE | {"item_separator": ", ", "key_separator": ": "}
"""The spaces in the JSON of calls as chat templates, and so models, write them."""

CALL = "call"
"""The type of the form that `call_form` returns."""

LARK = "lark"
"""The type of a form that is a grammar itself."""

NO_ARGUMENTS = {"type": "object", "properties": {}}
"""The parameters of a function that names none."""

_LISTING = re.compile(r"\n\s*1 \| ")
"""The words with which llguidance begins to show the grammar."""

_WIDEST = 2**63 - 1024
"""The largest bound of a number that llguidance can count to, and that is one in 64 bits of
floating point, too."""

_BOUNDS = {"maximum": 1, "exclusiveMaximum": 1, "minimum": -1, "exclusiveMinimum": -1}

_NARROWER = {
    "date": {"pattern": r"^0*[1-9]"},
    "date-time": {"pattern": r"^0*[1-9]\d*-\d\d-\d\d[Tt]\d\d:\d\d:[0-5]"},
    "time": {"pattern": r"^\d\d:\d\d:[0-5]"},
    **{f"uuid{n}": {"format": "uuid", "pattern": f"^.{{14}}{n}"} for n in range(1, 9)},
}
"""Formats of strings in llguidance's words. It writes leap seconds and the year 0, which the dates
of Python and JavaScript do not have, and does not know the versions of UUIDs, as pydantic names
them."""

_LITERAL = ("const", "enum", "default", "examples", "required", "description", "title")
_SAYS_MORE = {"additionalProperties", "unevaluatedProperties", "patternProperties"}
_PARTS = {"anyOf", "oneOf", "$ref", "if", "dependentSchemas"}


class Grammar:
    """The state of one answer; every method is safe whatever the model has written.

    Args:
        matcher: llguidance's, in its initial state.
        end_tokens: ids that it allows when the answer may end.
        begins_after: sequences of ids; the grammar applies once all have appeared, in this order.
            The end of the reasoning, for example; empty: at once.
        early_ends: ids that would end the answer before that.
        parameter: that has asked for it.
        calls: sequences of ids. Where the grammar begins, one of them may begin a call instead: all
            that follows it is free.
        bare_call: the matcher of a call without marks that the answer may be instead; None: none.
    """

    def __init__(
        self,
        matcher: Any,
        end_tokens: Sequence[int],
        begins_after: Sequence[Sequence[int]] = (),
        early_ends: Sequence[int] = (),
        parameter: str = "response_format",
        calls: Sequence[Sequence[int]] = (),
        bare_call: Any = None,
    ) -> None:
        self._early_ends = list(early_ends)
        self._parameter = parameter
        self._matcher = matcher
        self._bare_call = bare_call  # while the answer may be either
        self._end_tokens = frozenset(end_tokens)
        self._end_bits = sum(1 << token for token in self._end_tokens)
        self._begins_after = [list(ids) for ids in begins_after]
        self._latest: list[int] = []
        self._can_only_end = False
        # The marks that may still become one; none once the answer has taken another way.
        self._calls = [list(ids) for ids in calls]
        self._mark: list[int] = []
        self._is_free = False

    @property
    def is_over(self) -> bool:
        """True if the answer is complete: nothing more can follow."""
        if self._begins_after or self._mark:
            return False
        return self._can_only_end or (self._bare_call is None and bool(self._matcher.is_stopped()))

    @property
    def has_begun(self) -> bool:
        """True if the part of the answer that must follow it has begun."""
        return not self._begins_after

    @property
    def lead(self) -> tuple[list[int], int] | None:
        """Return the ids that would end the answer too early, and the one that begins what the
        grammar begins after, or goes on with it; None once the grammar applies."""
        if not self._begins_after:
            return None
        wanted = self._begins_after[0]
        lengths = range(len(wanted) - 1, 0, -1)
        next_place = next((n for n in lengths if self._latest[-n:] == wanted[:n]), 0)
        return self._early_ends, wanted[next_place]

    @property
    def warning(self) -> str:
        """Return what its schema asks for and it does not enforce; empty if it enforces all."""
        left_out = "; ".join(self._matcher.get_grammar_warnings())[:MAX_WARNING]
        return left_out and f"{self._parameter}: not enforced: {left_out}"

    @property
    def error(self) -> str:
        """Return why the matcher gave up, which ends the answer; empty if it did not."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def refusal(self, *, is_over: bool) -> RemoteError | None:
        """Return the error of an answer without what it had to contain; None if it is right so far.

        Args:
            is_over: whether the model has ended it.
        """
        if self.error:
            problem = f"cannot continue within its {self._parameter}, which is too complex: "
            problem += self.error
        elif is_over and not self.has_begun:
            problem = f"ended in its reasoning, before the part that {self._parameter} asks for"
        else:
            return None
        return RemoteError(
            ErrorCode.INVALID_REQUEST,
            f"the answer {problem}",
            detail={"parameter": self._parameter},
        )

    def is_end(self, token: int) -> bool:
        """True if this token ended the answer, and is not part of it."""
        return self.is_over and token in self._end_tokens

    def accept(self, token: int) -> None:
        """Takes the next token of the answer."""
        if self._is_free:
            return
        if not self._begins_after:
            if not self._goes_on_with_mark(token) and not self.is_over:
                self._goes_on(token)
            return
        wanted = self._begins_after[0]
        self._latest = [*self._latest, token][-len(wanted) :]
        if self._latest == wanted:
            del self._begins_after[0]
            self._latest = []

    def mask(self) -> bytes | None:
        """Return the tokens that may follow, one bit each, the lowest first; None for any."""
        if self._begins_after or self._is_free or self.is_over:
            return None
        mask = bytes(self._matcher.compute_bitmask())
        allowed = int.from_bytes(mask, "little")
        if self._bare_call is not None:
            allowed |= int.from_bytes(self._bare_call.compute_bitmask(), "little")
            mask = allowed.to_bytes(len(mask), "little")
        # Not every tokenizer has an end-of-text token that could be drawn instead.
        self._can_only_end = not allowed & ~self._end_bits
        if self._can_only_end:
            return None
        if self._calls:
            place = len(self._mark)
            marks = {ids[place] for ids in self._open_calls()}
            allowed = sum(1 << token for token in marks) | (0 if place else allowed)
            mask = allowed.to_bytes(len(mask), "little")
        return mask

    def _goes_on(self, token: int) -> None:
        """Take a token of the answer, and find out whether it is a call without marks."""
        bare_call, self._bare_call = self._bare_call, None
        if bare_call is not None and bare_call.try_consume_tokens([token]):
            if not self._matcher.try_consume_tokens([token]):
                self._matcher = bare_call
            else:
                self._bare_call = bare_call
        else:
            self._matcher.consume_token(token)

    def _open_calls(self) -> list[list[int]]:
        """Return the marks that may begin a call here. One that could also begin what the grammar
        describes is none: an answer is either."""
        if not self._mark and self._calls:
            allowed = int.from_bytes(self._matcher.compute_bitmask(), "little")
            self._calls = [ids for ids in self._calls if not allowed >> ids[0] & 1]
        return self._calls

    def _goes_on_with_mark(self, token: int) -> bool:
        """Take a token of a mark; return whether it is one."""
        mark = [*self._mark, token]
        self._calls = [ids for ids in self._open_calls() if ids[: len(mark)] == mark]
        self._mark = mark if self._calls else []
        self._is_free = mark in self._calls
        return bool(self._calls)


class HeldCalls:
    """The state of an answer that is free, but for its calls: behind the mark that begins one a
    grammar holds it until the mark that ends it.

    A call that its grammar does not fit from the beginning stays free, and so does one in the
    reasoning, which may be a thought about calls.

    Args:
        marked: llguidance's matcher for a call behind a mark, in its initial state; None: such
            calls stay free.
        bare: for a call without marks.
        watch: sorts the text of the answer into its parts, from the beginning.
        detokenizer: of this answer.
        tokenizer: llguidance's.
        is_last: true if nothing can follow calls behind a mark.
    """

    lead: None = None
    """It has no part in which the answer may not end."""

    warning: str = ""
    """An answer that is free owes nothing that could be left out."""

    def __init__(
        self,
        *,
        marked: Any,
        bare: Any,
        watch: ChannelParser,
        detokenizer: Any,
        tokenizer: Any,
        is_last: bool,
    ) -> None:
        self._matchers = {False: marked, True: bare}  # by whether the call is bare
        self._watch = watch
        self._detokenizer = detokenizer
        self._tokenizer = tokenizer
        self._is_last = is_last
        self._call: Grammar | None = None  # while one is held
        self._ends_answer = False
        self._seen: object = None  # of the latest call that has begun

    @property
    def is_over(self) -> bool:
        """True if the answer is complete: nothing more can follow."""
        return self._call is not None and self._call.is_over

    def refusal(self, *, is_over: bool) -> None:
        """Return None: an answer need not have a call."""

    def is_end(self, token: int) -> bool:
        """True if this token ended the answer, and is not part of it."""
        return self._call is not None and self._call.is_end(token)

    def accept(self, token: int) -> None:
        """Takes the next token of the answer."""
        text = self._detokenizer.add(token)
        if self._watch.plain_channel(text) is None:
            self._watch.add(text)
        elif self._call is None:
            return
        if self._call is not None:
            self._call.accept(token)
            self._let_go()
        elif (begun := self._watch.begun_call) is not None and begun.identity != self._seen:
            self._seen = begun.identity
            self._hold(begun.text, is_bare=begun.is_bare)

    def mask(self) -> bytes | None:
        """Return the tokens that may follow, one bit each, the lowest first; None for any."""
        if self._call is None:
            return None
        mask = self._call.mask()
        self._let_go()
        return mask

    def _hold(self, text: str, *, is_bare: bool) -> None:
        """Hold a call that begins with this text, if it can be held."""
        if (matcher := self._matchers[is_bare]) is None:
            return
        matcher = matcher.deep_copy()
        tokens = self._tokenizer.greedy_tokenize(text)
        if matcher.try_consume_tokens(tokens) == len(tokens):
            self._call = Grammar(matcher, self._tokenizer.eos_tokens)
            self._ends_answer = self._is_last and not is_bare

    def _let_go(self) -> None:
        """Let the answer go on freely behind a call that is whole, or too complex."""
        call = self._call
        if call is not None and call.is_over and (call.error or not self._ends_answer):
            self._call = None


RowGrammar = Grammar | HeldCalls
"""What the engine asks before it draws a token of a row."""


class StrictSchemas:
    """The schemas that the arguments of calls must match.

    Args:
        matcher: llguidance's, in its initial state, for `{"name": …, "arguments": …}`.
        tokenizer: llguidance's.
        schemas: of the arguments, by the name of the function.
    """

    def __init__(self, matcher: Any, tokenizer: Any, schemas: Mapping[str, Any]) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._schemas = schemas

    def fit(self, line: str) -> bool:
        """True if the arguments of a call match the function's schema, or if there is none.

        Args:
            line: the call as a line of JSON, in OpenAI's form.
        """
        function = json.loads(line)["function"]
        name, arguments = function["name"], json.loads(function["arguments"])
        if name not in self._schemas:
            return True
        schema = self._schemas[name]
        return any(self._matches(name, one) for one in (arguments, in_order(arguments, schema)))

    def _matches(self, name: str, arguments: Any) -> bool:
        """True if they match in this very order."""
        call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        call = call.replace("\x7f", r"\u007f")  # llguidance takes no other
        matcher = self._matcher.deep_copy()
        tokens = self._tokenizer.greedy_tokenize(call)
        is_read = matcher.try_consume_tokens(tokens) == len(tokens)
        return is_read and bool(matcher.is_accepting())


class NoGrammarsError(RemoteError):
    """No grammar can be made here, whatever a request asks for."""


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
        form: dict[str, Any],
        begins_after: Sequence[Sequence[int]] = (),
        early_ends: Sequence[int] = (),
        calls: Sequence[Sequence[int]] = (),
        bare_call: Any = None,
    ) -> Grammar:
        """Compile the grammar of one answer.

        Args:
            form: a `response_format`, or what `call_form` returns.
            begins_after, early_ends, calls: see `Grammar`.
            bare_call: as there, in its initial state.

        Raises:
            RemoteError: `invalid_request`: it is impossible or too complex.
            NoGrammarsError: llguidance does not know the tokenizer.
        """
        parameter = "tools" if form["type"] == CALL else "response_format"
        ends = self.tokenizer.eos_tokens
        matcher = self.matcher(form, parameter).deep_copy()
        bare_call = bare_call and bare_call.deep_copy()
        return Grammar(matcher, ends, begins_after, early_ends, parameter, calls, bare_call)

    def strict_schemas(self, tools: Sequence[dict[str, Any]]) -> StrictSchemas:
        """Return what the calls of these functions must match.

        Args:
            tools: in OpenAI's form.

        Raises: see `compile`.
        """
        tokenizer = self.tokenizer
        form = call_form(tools)
        return StrictSchemas(self.matcher(form, "tools"), tokenizer, dict(form["tools"]))

    @property
    def tokenizer(self) -> Any:
        """Return llguidance's view of the model's vocabulary; raises as `compile` does."""
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def matcher(self, form: dict[str, Any], parameter: str) -> Any:
        """Return llguidance's matcher for a form, in its initial state; raises as `compile` does.

        Args:
            form: see `compile`; or of the type `lark`, with the grammar itself.
            parameter: that asks for it.
        """
        try:
            key = json.dumps(form, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise _impossible(str(error), parameter) from None
        matcher = self._matchers.pop(key, None)
        if matcher is None:
            matcher = self._compile(form, parameter)
        self._matchers[key] = matcher
        while len(self._matchers) > MAX_KEPT:
            self._matchers.popitem(last=False)
        return matcher

    def _compile(self, form: dict[str, Any], parameter: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        try:
            matcher = LLMatcher(
                self.tokenizer,
                _grammar_text(form),
                log_level=0,
                limits=LLParserLimits(max_items_in_row=MAX_CHOICES),
            )
        except ValueError as error:
            raise _impossible(str(error), parameter) from None
        if matcher.is_error():
            if form["type"] == CALL and len(form["tools"]) > 1:
                for tool in form["tools"]:  # one of them alone says which it is
                    self._compile(form | {"tools": [tool]}, parameter)
            raise _impossible(matcher.get_error(), parameter, _subject(form))
        probe = Grammar(matcher.deep_copy(), self.tokenizer.eos_tokens)
        if probe.mask() is None:
            raise _impossible(probe.error or "it only allows the empty answer", parameter)
        _walk_ahead(probe, parameter)
        return matcher


def call_form(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the form of an answer that is one call: `{"name": …, "arguments": …}`, whatever the
    family of the model, so that every model can be made to call.

    The family's own markers are left out, as vLLM does it: they would need a second description of
    each format beside its reader, and values between tags have no grammar that follows a schema.

    Args:
        tools: the functions to choose from, in OpenAI's form.

    Raises:
        RemoteError: `invalid_request`: the arguments of one could not be an object.
    """
    called: list[list[Any]] = []
    for tool in tools:
        name = tool["function"]["name"]
        said = tool["function"].get("parameters") or {}
        schema = NO_ARGUMENTS | {key: one for key, one in said.items() if one is not None}
        given = schema.get("type", "object")
        if given != "object" and not (isinstance(given, list) and "object" in given):
            raise unfit("tools", f"the parameters of {name[:64]!r} must be of type object")
        try:
            called.append([name, closed(schema | {"type": "object"})])
        except ValueError as error:
            raise unfit("tools", f"the parameters of {name[:64]!r}: {error}") from None
    return {"type": CALL, "tools": called}


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties but those that it names, unless it says
    something else: JSON Schema allows any others, and small models add them without end. What has
    properties is an object: JSON Schema also allows all that is none.

    What llguidance cannot read is put into its words: numbers have bounds that it can count to,
    because schemas have the least and the largest of a language's numbers, such as those of int64;
    keywords that are null are left out; references without `#`, as LiteLLM sends them, have one;
    the choice or pattern of `propertyNames` becomes properties; and what is never there is not
    allowed. A `pattern` that it cannot follow, such as pydantic's of decimals and zod's of
    durations, which look ahead, becomes a format that it does not know: it warns of that.

    Raises:
        ValueError: it is nested too deeply, or asks for numbers beyond those.
    """
    try:
        return _closed(_readable(schema, schema))
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None


def _readable(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_readable(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("not") in ({}, True):  # zod's and pydantic's `never`
        return False
    readable = _with_parts(schema, lambda part: _readable(part, root))
    for name, sign in _BOUNDS.items():
        bound = readable.get(name)
        if not isinstance(bound, int | float):
            continue
        if sign * bound > _WIDEST:
            readable[name] = sign * _WIDEST
        elif sign * bound < -_WIDEST:
            raise ValueError(f"{name} allows only numbers of more than 64 bits")
    reference, pattern = readable.get("$ref"), readable.get("pattern")
    if isinstance(reference, str) and reference.startswith("/"):
        readable["$ref"] = f"#{reference}"
    if isinstance(pattern, str) and not _is_followed(pattern):
        del readable["pattern"]
        return {"allOf": [readable, {"format": f"pattern {pattern}"}]}
    if pattern is None and isinstance(form := readable.get("format"), str):
        readable |= _NARROWER.get(form, {})
    return _with_names(readable, root)


def _with_names(schema: dict[str, Any], root: Any) -> dict[str, Any]:
    """Return the schema of a map with the names that its keys may have, such as those of an enum,
    as properties, or as a pattern: llguidance knows no `propertyNames`."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and isinstance(reference := names.get("$ref"), str):
        names = root
        for part in reference.removeprefix("#/").split("/"):
            names = names.get(part) if isinstance(names, dict) else None
    if not isinstance(names, dict):
        return schema
    others = schema.get("additionalProperties", True)
    choice, pattern = names.get("enum", [names.get("const")]), names.get("pattern")
    chosen = [name for name in choice if isinstance(name, str)] if isinstance(choice, list) else []
    if chosen:
        named = {"properties": dict.fromkeys(chosen, others) | schema.get("properties", {})}
    elif isinstance(pattern, str) and _is_followed(pattern) and "patternProperties" not in schema:
        named = {"patternProperties": {pattern: others}}
    else:
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    return rest | named | {"additionalProperties": False}


@lru_cache(maxsize=MAX_PATTERNS)
def _is_followed(pattern: str) -> bool:
    """True if llguidance can hold a string to this regular expression."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern})
    return not LLMatcher.validate_grammar(grammar)


def _with_parts(schema: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Return a schema in which each schema inside it is changed, and no keyword is null."""
    return {
        name: {key: change(one) for key, one in value.items()}
        if name in ("properties", "$defs", "definitions") and isinstance(value, dict)
        else (value if name in _LITERAL else change(value))
        for name, value in schema.items()
        if value is not None or name == "const"
    }


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "allOf" in schema or ("properties" in schema and _PARTS & schema.keys()):
        return schema  # each of its parts knows some properties only
    inner = _with_parts(schema, _closed)
    named, required = inner.get("properties"), inner.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list):
        return inner
    if _SAYS_MORE & inner.keys() or not named.keys() >= {*map(str, required)}:
        return inner
    return {"type": "object", **inner, "additionalProperties": False}


def _grammar_text(form: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    if form["type"] == LARK:
        return str(form[LARK])
    if form["type"] == "regex":
        return str(LLMatcher.grammar_from_regex(form["regex"]))
    if form["type"] == CALL:
        return _call_grammar(form["tools"])
    is_any = form["type"] == "json_object"
    schema: Any = {"type": "object"} if is_any else closed(form["json_schema"]["schema"])
    return str(LLMatcher.grammar_from_json_schema(schema, overrides=DENSE))  # type: ignore[arg-type]


def _call_grammar(tools: Sequence[Sequence[Any]]) -> str:
    """Return the grammar of one call in llguidance's variant of Lark; each schema is a root of its
    own, to which its references are relative."""
    lines = ["start: " + " | ".join(f"call{number}" for number in range(len(tools)))]
    for number, (name, schema) in enumerate(tools):
        begin = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": ')
        arguments = schema | {"x-guidance": AS_TEMPLATES}
        lines.append(f'call{number}: {begin} arguments{number} "}}"')
        lines.append(f"arguments{number}: %json {json.dumps(arguments)}")
    return "\n".join(lines)


def _walk_ahead(probe: Grammar, parameter: str) -> None:
    """Goes where every answer must go: a format that breaks there is refused before it begins.

    Raises:
        RemoteError: `invalid_request`.
    """
    for step in range(WALKED_TOKENS):
        mask = probe.mask()
        if probe.error:
            raise _impossible(probe.error, parameter)
        allowed = int.from_bytes(mask or b"", "little")
        if not allowed or (step >= FREE_STEPS and allowed.bit_count() > 1):
            return
        probe.accept((allowed & -allowed).bit_length() - 1)


def _first_line(text: object) -> str:
    """Return an error of llguidance in one line, without the state of its parser and the
    grammar."""
    return " ".join(_LISTING.split(str(text).split("<state>")[0])[0].split())


def _subject(form: dict[str, Any]) -> str:
    """Return the part of a form that is impossible, if it is not all of it."""
    return f"the parameters of {form['tools'][0][0][:64]!r}" if form["type"] == CALL else ""


def _impossible(why: str, parameter: str, subject: str = "") -> RemoteError:
    why = _first_line(why)[:300]
    if "lookaround" in why or "look-around" in why:
        why = r"a regular expression with look-around ((?=…), (?<=…), \b), which is not supported"
    elif "regex parse error" in why:
        why = f"a regular expression: {why.rpartition('error: ')[2]}"
    if "NoExtensionBias" in why or not why:
        why = "nothing can match it"
    return unfit(parameter, f"no answer can fit {subject or parameter}: {why}")
