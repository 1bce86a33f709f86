"""What reaches a terminal: our own style, and no control character of anybody else."""

from __future__ import annotations

import io
import json
import re
import unicodedata
from typing import TextIO, cast

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.cli.terminal.output import CLEAR_LINE, Output, styled
from mlxsup.cli.terminal.writer import GuardedStream, for_terminal, own, plain

ACTING = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
FORCING = set(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
BRICKS = (
    "\x1b", "\x9b", "\x90", "[31m", "[2J", "]0;x", "\x07", "\r", "\x7f", "\x85", "\u061c", "\u200d",
    "\u200f", "\u202e", "\u2066", "\u2028", "\U000e0041", "\udc9b", "\x1b[31m", "x", "ä", "\n",
    "\t",
    "0123456789abcdef" * 2,
)  # fmt: skip

BEGIN, END = own(" ").split(" ")
anything = st.text() | st.lists(st.sampled_from(BRICKS)).map("".join)
foreign = anything.filter(lambda text: BEGIN not in text and END not in text)
"""Hypothesis reads patterns of the modules that it tests, and so finds out the marks."""

ours = st.sampled_from([CLEAR_LINE, own("\x1b[7A"), own("\x1b[J")])
mixed = st.lists(foreign | ours | foreign.map(lambda text: styled(text, fg="red", bold=True))).map(
    "".join
)
OURS = re.compile(r"\r\x1b\[K|\x1b\[(?:7A|J|31m\x1b\[1m|0m)")


class Screen(io.StringIO):
    """A terminal that notes what is written."""

    def isatty(self) -> bool:
        """See `io.IOBase.isatty`."""
        return True


def acting(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ACTING and c not in "\n\t"]


@given(foreign)
def test_nothing_of_another_acts_and_every_character_keeps_its_place(text: str) -> None:
    shown = for_terminal(text)
    assert acting(shown) == []
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable() or a in "\n\t")


@given(mixed)
def test_own_style_survives_around_anything_and_only_it(text: str) -> None:
    shown = for_terminal(text)
    assert acting(OURS.sub("", shown)) == []
    assert OURS.sub("", shown) == for_terminal(plain(text))
    assert "\x1b" not in for_terminal(plain(text))


@given(mixed, st.integers(0, 400), st.integers(0, 400), foreign)
@example(styled("\x1b[31m", fg="red"), 1, 400, "")
@example(styled("x", fg="red"), 0, len(BEGIN) + len("\x1b[31m"), "\x1b[2J")
def test_a_style_that_is_cut_sets_nothing_free(text: str, begin: int, end: int, more: str) -> None:
    assert acting(OURS.sub("", for_terminal(text[begin : begin + end] + more))) == []


@given(foreign)
def test_an_answer_keeps_what_languages_need_and_nothing_that_forces_an_order(text: str) -> None:
    shown = for_terminal(text, is_answer=True)
    assert {unicodedata.category(c) for c in acting(shown)} <= {"Cf"}
    assert not FORCING & set(shown)
    assert not [c for c in shown if 0xE0000 <= ord(c) <= 0xE00FF]


def test_honest_text_is_not_changed() -> None:
    honest = "שלום\u200f (abc)، می\u200cخواهم 👩\u200d💻 é 日本語\n\tend"
    assert for_terminal(honest, is_answer=True) == honest
    assert for_terminal("Grüße, 日本語, 👍\n\tend") == "Grüße, 日本語, 👍\n\tend"


def test_click_and_print_pass_the_guard_and_there_is_no_way_around_it() -> None:
    screen = Screen()
    stream = GuardedStream(screen)
    print("\x1b[2J", file=stream)
    click.secho("\x9b", file=cast(TextIO, stream), fg="red")
    stream.writelines(["\x07", "\u202e"])
    Output().answer("\x1b]0;\u200f", cast(TextIO, stream))
    assert acting(screen.getvalue()) == ["\u200f"]
    assert not hasattr(GuardedStream(io.TextIOWrapper(io.BytesIO())), "buffer")


def test_in_a_pipe_answers_alone_are_as_they_are_and_there_is_no_style() -> None:
    pipe = io.StringIO()
    stream = GuardedStream(pipe)
    print(styled("\x1b[2J\u202e", fg="red"), file=stream, end="|")
    stream.write_answer(own("\r") + "\x1b[2J\u202e")
    assert pipe.getvalue() == "␛[2J\ufffd|\x1b[2J\u202e"


@given(foreign)
def test_a_line_of_json_is_printable_and_means_the_same(text: str) -> None:
    line = Output.object_line({"text": text, text: 1})
    assert line.isprintable()
    assert json.loads(line)["text"] == text.encode("utf-16", "surrogatepass").decode(
        "utf-16", "surrogatepass"
    )


def test_no_line_of_an_error_passes_for_its_hint(capsys: pytest.CaptureFixture[str]) -> None:
    from mlxsup.cli.exit_status import CliError

    Output().error(CliError("it says:\nhint: run `x`\n  - so", code="x", hint="do this"))
    assert capsys.readouterr().err.splitlines() == [
        "error: it says:", "  hint: run `x`", "  - so", "hint: do this",
    ]  # fmt: skip
