"""What is typed in a chat: lines become turns, and turns are remembered."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxsup.cli.terminal.history import MAX_ENTRIES, History
from mlxsup.cli.terminal.turns import PROMPT, PROMPT_ON, read_turn


def lines(*texts: str, prompts: list[str] | None = None) -> Callable[[str], str | None]:
    given = iter(texts)

    def read_line(prompt: str) -> str | None:
        if prompts is not None:
            prompts.append(prompt)
        return next(given, None)

    return read_line


@pytest.mark.parametrize(
    ("typed", "turn"),
    [
        (["one", "two"], "one"),
        (["one\\", "two", "three"], "one\ntwo"),
        (["ends with two\\\\", "x"], "ends with two\\\\"),
        (["see ```", "a\\", "", "b", "```", "x"], "see ```\na\\\n\nb\n```"),
        (["```", "a", "``` and\\", "on", "x"], "```\na\n``` and\non"),
        (["in ```one``` line", "x"], "in ```one``` line"),
        (["cut off\\"], "cut off"),
        (["```", "cut off"], "```\ncut off"),
        (['"""', "a\\", "", "```", 'b"""', "x"], "a\\\n\n```\nb"),
        (['""" one"""', "x"], " one"),
        (['"""one', 'two """ three', '"""', "x"], 'one\ntwo """ three'),
        (['"""', "cut off"], "cut off"),
        (['""""""', "x"], ""),
        (['say """', "x"], 'say """'),
        ([""], ""),
        ([], None),
    ],
)
def test_turn_is_a_line_or_what_a_backslash_or_a_fence_holds_together(
    typed: list[str], turn: str | None
) -> None:
    assert read_turn(lines(*typed)) == turn


def test_prompt_shows_that_a_turn_goes_on() -> None:
    prompts: list[str] = []
    read_turn(lines("a\\", "b", prompts=prompts))
    assert prompts == [PROMPT, PROMPT_ON]


def test_history_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / ".mlxsup" / "history"
    history = History(path)
    assert history.load() == []
    assert history.add("Hällo\nwörld")
    assert history.add("two")
    assert History(path).load() == ["Hällo\nwörld", "two"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_history_is_bounded_and_survives_what_it_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"no json\n\xff\n17\n" + b"[" * 100_000 + b"\n")
    history = History(path)
    assert history.load() == []
    for number in range(2 * MAX_ENTRIES):
        history.add(str(number))
    entries = history.load()
    assert (len(entries), entries[-1]) == (MAX_ENTRIES, str(2 * MAX_ENTRIES - 1))
    assert len(path.read_text().splitlines()) == MAX_ENTRIES


def test_history_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    history = History(tmp_path / "file" / "history")
    assert history.load() == []
    assert not history.add("x")
