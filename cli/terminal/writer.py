"""The one way out of the command line: text is shown, and only our own style acts.

`guard_streams` puts a `GuardedStream` in front of standard output and standard error, so that
`print`, click, prompts, tracebacks and warnings pass through it as `Output` does. What comes from a
model, a client, a daemon or a file may contain anything; a terminal obeys none of it. In a pipe,
whose other end may be a pager or a file that is shown later, only answers are written as they are.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from typing import Any, TextIO, cast

_BEGIN, _END = os.urandom(16).hex(), os.urandom(16).hex()
"""Stand around our own sequences; no text from outside can contain what is drawn anew in each
process and never written. They differ, or the text between two sequences of which the first is cut
off would stand between marks, too."""

_OWN = re.compile(rf"{_BEGIN}((?:\r|\x1b\[[0-9;]*[A-Za-z])+){_END}")
_LEFT = re.compile(f"{_BEGIN}|{_END}")

_FORCING = frozenset({*range(0x202A, 0x202F), *range(0x2066, 0x2070)})
"""Embeddings, overrides and isolates, which show text in another order than it is read in."""

_TAGS = range(0xE0000, 0xE0100)
"""Invisible letters: a model can hide instructions in them from the user who copies its answer."""

_NEVER_SHOWN = frozenset({"Cc", "Cs", "Zl", "Zp"})
_MOST_KEPT = 8192


class _Signs(dict[int, str]):
    """What stands for each character, as `str.translate` asks for it; the first ones are kept.

    Args:
        is_answer: whether the text is an answer, in which honest Arabic, Hebrew, Persian and emoji
            need marks and joiners that would only deceive in a name or an error.
    """

    def __init__(self, *, is_answer: bool) -> None:
        super().__init__()
        self._is_answer = is_answer

    def __missing__(self, code: int) -> str:
        sign = self._sign_of(code)
        if len(self) < _MOST_KEPT:
            self[code] = sign
        return sign

    def _sign_of(self, code: int) -> str:
        sign = chr(code)
        if sign in "\n\t":
            return sign
        if code < 0x20:
            return chr(0x2400 + code)
        category = unicodedata.category(sign)
        is_kept = category != "Cf" or (self._is_answer and code not in _FORCING)
        return sign if is_kept and category not in _NEVER_SHOWN and code not in _TAGS else "\ufffd"


_TEXT_SIGNS, _ANSWER_SIGNS = _Signs(is_answer=False), _Signs(is_answer=True)


def own(sequence: str) -> str:
    """Mark our own control sequence, so that it acts on a terminal and vanishes elsewhere.

    Args:
        sequence: carriage returns and CSI sequences, none of whose bytes come from outside.
    """
    return f"{_BEGIN}{sequence}{_END}"


def plain(text: str) -> str:
    """Return the text without our own sequences, as it is written to what is no terminal."""
    return _LEFT.sub("", _OWN.sub("", text))


def for_terminal(text: str, *, is_answer: bool = False) -> str:
    """Return the text for a terminal: our own sequences, and signs for all else that would act.

    Line breaks and tabs stay. Other characters keep their number, so widths stay as measured.
    """
    signs = _ANSWER_SIGNS if is_answer else _TEXT_SIGNS
    pieces = _OWN.split(text)
    pieces[::2] = [_LEFT.sub("", piece).translate(signs) for piece in pieces[::2]]
    return "".join(pieces)


class GuardedStream(io.TextIOBase):
    """A text stream that writes nothing which a terminal would obey, but our own style and, where
    it is none, answers. It has no `buffer`: there is no way around it.

    Args:
        stream: written to.

    Attributes:
        stream: the same, for what has passed through `for_terminal` already.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text, with signs for controls that are not ours; without ours if this is no
        terminal."""
        self.stream.write(for_terminal(text if self.isatty() else plain(text)))
        return len(text)

    def write_answer(self, text: str) -> None:
        """Write text of a model: with marks of direction and joiners, and to what is no terminal
        as it is."""
        self.stream.write(for_terminal(text, is_answer=True) if self.isatty() else plain(text))

    def flush(self) -> None:
        """See `io.IOBase.flush`."""
        self.stream.flush()

    def isatty(self) -> bool:
        """See `io.IOBase.isatty`."""
        return self.stream.isatty()

    def fileno(self) -> int:
        """See `io.IOBase.fileno`."""
        return self.stream.fileno()

    def writable(self) -> bool:
        """See `io.IOBase.writable`."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See `io.TextIOBase.encoding`."""
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """See `io.TextIOBase.errors`."""
        return self.stream.errors

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            raise AttributeError(name)
        return getattr(self.stream, name)


def guard_streams() -> None:
    """Guard standard output and standard error of this process, for its whole life."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, GuardedStream):
            setattr(sys, name, GuardedStream(stream))


def beneath(stream: TextIO) -> TextIO:
    """Return the stream below the guard, for a library that writes sequences of its own and is
    given nothing that has not passed through `for_terminal`."""
    guarded = cast(object, stream)
    return guarded.stream if isinstance(guarded, GuardedStream) else stream
