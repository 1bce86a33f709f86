"""The turns of a chat, its history and its files."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from mlxsup.cli.conversation.conversation import Conversation
from mlxsup.cli.conversation.interrupts import Interrupts
from mlxsup.cli.conversation.saved_file import MAX_BYTES, load, save
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.history import MAX_ENTRIES, History
from mlxsup.cli.terminal.turns import read_turn


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def talk(*texts: str, system: str | None = None) -> Conversation:
    """A conversation in which each second text answered the one before it."""
    conversation = Conversation(model="m", parameters={}, system=system)
    for turn, said in zip(texts[::2], texts[1::2], strict=True):
        conversation.take(conversation.ask(turn), said)
    return conversation


# ---------------------------------------------------------------- turns


def test_each_turn_sends_what_was_said_before() -> None:
    conversation = talk("one", "1", "two", "2", system="Be brief.")
    sent = conversation.to_send(conversation.ask("three"))
    system = {"role": "system", "content": "Be brief."}
    assert sent == [system, user("one"), answer("1"), user("two"), answer("2"), user("three")]


def test_the_latest_turn_is_answered_again_and_the_old_answer_stays_until_then() -> None:
    conversation = talk("one", "1", "two", "2")
    again = conversation.ask_again()
    assert again is not None
    assert conversation.to_send(again) == [user("one"), answer("1"), user("two")]
    # No answer has come.
    assert conversation.ask_again() == again
    assert conversation.messages == talk("one", "1", "two", "2").messages
    conversation.take(again, "II")
    assert conversation.messages == talk("one", "1", "two", "II").messages


def test_a_turn_that_failed_is_the_one_that_is_answered_again() -> None:
    conversation = talk("one", "1")
    failed = conversation.ask("two")
    assert conversation.ask_again() == failed
    conversation.take(failed, "2")
    again = conversation.ask_again()
    assert again is not None
    assert again.turn == "two"
    conversation.forget()
    assert conversation.ask_again() is None
    conversation.ask("three")
    conversation.forget()
    assert conversation.ask_again() is None


# ---------------------------------------------------------------- the file


def test_a_saved_conversation_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    saved = talk("hällo\n", "1", "two", "2", system="Be brief.")
    saved.ask("unanswered")
    save(saved, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = talk("gone", "0")
    other.ask("gone, too")
    load(other, path)
    assert (other.messages, other.system, other.model) == (saved.messages, "Be brief.", "m")
    again = other.ask_again()
    assert again is not None
    assert (again.turn, other.file) == ("unanswered", path)


def test_only_its_own_file_is_written_over(tmp_path: Path) -> None:
    own, other = tmp_path / "own.json", tmp_path / "other.json"
    other.write_text("precious")
    conversation = talk("one", "1")
    with pytest.raises(CliError, match=r"other\.json exists; save under another name"):
        save(conversation, other)
    assert other.read_text() == "precious"
    save(conversation, own)
    conversation.take(conversation.ask("two"), "2")
    save(conversation, own)
    assert len(json.loads(own.read_text())["messages"]) == 4
    with pytest.raises(CliError, match=r"other\.json exists"):
        save(conversation, other)
    assert other.read_text() == "precious"
    with pytest.raises(CliError, match="exists"):
        save(talk("one", "1"), own)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.json", "own.json"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("no/such/folder.json", "No such file"), ("", "exists"), ("a\0b", "null byte")],
)
def test_a_file_that_cannot_be_written_says_why(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(CliError, match=words):
        save(talk("one", "1"), tmp_path / name)


def saved(**changes: Any) -> bytes:
    value = {"schema_version": 1, "model": "m", "system": None, "messages": [user("one")]}
    return json.dumps({**value, **changes}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b" " * (MAX_BYTES + 1),
        saved(schema_version=2),
        saved(system=3),
        saved(messages="one"),
        saved(messages=[answer("1")]),
        saved(messages=[user("one"), user("two")]),
        saved(messages=[{"role": "user"}]),
        saved(messages=[{"role": "user", "content": 1}]),
        saved(messages=[{**user("one"), "tool_calls": []}]),
        saved(messages=[{"role": "robot", "content": "x"}]),
    ],
    ids=lambda data: data[:60].decode("latin-1"),
)
def test_what_is_no_conversation_changes_nothing(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "talk.json"
    path.write_bytes(data)
    conversation = talk("one", "1", system="Be brief.")
    before = (list(conversation.messages), conversation.system, conversation.file)
    with pytest.raises(CliError, match="is no conversation that /save has written"):
        load(conversation, path)
    assert (conversation.messages, conversation.system, conversation.file) == before


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_says_why(tmp_path: Path, name: str) -> None:
    with pytest.raises(CliError, match="cannot read"):
        load(talk(), tmp_path / name)


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


class Answer:
    """Counts how often it was cancelled."""

    def __init__(self) -> None:
        self.cancels = 0

    def cancel(self) -> None:
        self.cancels += 1


@pytest.mark.parametrize("is_early", [True, False])
def test_an_interrupt_cancels_the_answer_even_before_there_is_one(is_early: bool) -> None:
    answer, before = Answer(), signal.getsignal(signal.SIGINT)
    with Interrupts(is_caught=True) as interrupts:
        if is_early:
            signal.raise_signal(signal.SIGINT)
        interrupts.cancel(cast(Any, answer))
        assert answer.cancels == is_early
        if not is_early:
            signal.raise_signal(signal.SIGINT)
        assert answer.cancels == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_without_a_person_an_interrupt_is_left_alone() -> None:
    answer = Answer()
    with Interrupts(is_caught=False) as interrupts:
        interrupts.cancel(cast(Any, answer))
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert answer.cancels == 0
