"""A case: one thing that users of a client package do, and how it went with a server."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any

import anthropic
import openai

REQUEST_LIMIT_S = 60.0
"""After which a case gives up on an answer."""

MOST_SAID = 120
"""Characters of a reason that are kept."""


class Verdict(StrEnum):
    """How a case went, as the table shows it."""

    PASSED = "yes"
    REFUSED = "refused"
    FAILED = "no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a case.

    Attributes:
        verdict: `REFUSED` if the server said that it does not do this.
        reason: why it has not passed; empty if it has.
    """

    verdict: Verdict
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A server that the cases can ask; it serves `support.models.known_model`.

    Attributes:
        name: in the table.
        url: without `/v1`.
        model: what its requests call the model.
        is_idle: whether it computes nothing.
    """

    name: str
    url: str
    model: str
    is_idle: Callable[[], bool]

    def openai(self, **settings: Any) -> Any:
        """OpenAI's client as its users have it; `settings` are further ones of it."""
        base = f"{self.url}/v1"
        given: dict[str, Any] = {"base_url": base, "api_key": "none", "timeout": REQUEST_LIMIT_S}
        return openai.OpenAI(**given | settings)

    def async_openai(self) -> Any:
        """The same for coroutines."""
        base = f"{self.url}/v1"
        return openai.AsyncOpenAI(base_url=base, api_key="none", timeout=REQUEST_LIMIT_S)

    def anthropic(self, **settings: Any) -> Any:
        """Anthropic's client as its users have it; `settings` are further ones of it."""
        given: dict[str, Any] = {"base_url": self.url, "api_key": "none"}
        given |= {"timeout": REQUEST_LIMIT_S}
        return anthropic.Anthropic(**given | settings)

    def async_anthropic(self) -> Any:
        """The same for coroutines."""
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="none", timeout=REQUEST_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that users do.

    Attributes:
        package: whose client it is.
        name: what it shows, in the table.
        run: does it; raises AssertionError if something else comes back than was asked for.
    """

    package: str
    name: str
    run: Callable[[Place], None]


class Cases(list[Case]):
    """The cases of a package, in the order in which they run.

    Args:
        package: whose.
    """

    def __init__(self, package: str) -> None:
        super().__init__()
        self.package = package

    def add(self, name: str) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
        """Makes a function a case of this name."""

        def decorate(run: Callable[[Place], None]) -> Callable[[Place], None]:
            self.append(Case(package=self.package, name=name, run=run))
            return run

        return decorate


def outcome(case: Case, place: Place) -> Outcome:
    """Runs a case. What a malformed answer does to a package or to the case is a failure, too."""
    try:
        case.run(place)
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        reason = f"{error.status_code}: {error.response.text}"
        if is_refusal(error.status_code):
            return Outcome(verdict=Verdict.REFUSED, reason=_short(reason))
        return Outcome(verdict=Verdict.FAILED, reason=_short(reason))
    except (
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        OSError,
        openai.OpenAIError,
        anthropic.AnthropicError,
    ) as error:
        return Outcome(verdict=Verdict.FAILED, reason=_short(_said(error)))
    return Outcome(verdict=Verdict.PASSED)


def same(seen: object, wanted: object) -> None:
    """Demands that something is what it should be; what it is goes into the table."""
    assert seen == wanted, f"{seen!r} instead of {wanted!r}"


def is_refusal(status: int) -> bool:
    """Whether a status says that the server does not do this, and not that it has failed."""
    return status < HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.NOT_IMPLEMENTED


def _said(error: Exception) -> str:
    """What an exception says; an assertion without words is its line."""
    if isinstance(error, AssertionError) and not str(error):
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        return f"not so: {line.removeprefix('assert ')}"
    return str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"


def _short(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MOST_SAID else f"{line[: MOST_SAID - 1]}…"
