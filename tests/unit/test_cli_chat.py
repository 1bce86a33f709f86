"""The turns of a chat and its history."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from mlxsup.cli.arguments import model_meant
from mlxsup.cli.commands.chat import Conversation, interrupts_cancel
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.options import below
from mlxsup.cli.pictures import check_taker, read_picture
from mlxsup.cli.turn_reader import HISTORY_BYTES, Commands, History

from support.gateway.pictures import PNG


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


def test_request_has_the_system_prompt_and_what_was_said_before() -> None:
    conversation = talk("one", "1", "two", "2", system="Be brief.")
    sent = conversation.to_send(conversation.ask("three"))
    system = {"role": "system", "content": "Be brief."}
    assert sent == [system, user("one"), answer("1"), user("two"), answer("2"), user("three")]


def test_retry_is_of_the_latest_turn_whose_answer_stays_until_then() -> None:
    conversation = talk("one", "1", "two", "2")
    again = conversation.ask_again()
    assert again is not None
    assert conversation.to_send(again) == [user("one"), answer("1"), user("two")]
    # No answer has come.
    assert conversation.ask_again() == again
    assert conversation.messages == talk("one", "1", "two", "2").messages
    conversation.take(again, "II")
    assert conversation.messages == talk("one", "1", "two", "II").messages
    failed = conversation.ask("three")
    assert conversation.ask_again() == failed
    conversation.forget()
    assert conversation.ask_again() is None


ROWS = [
    {
        "name": "m",
        "aliases": ["em"],
        "adapters": {"sql": "/sql"},
        "presets": {"hot": {"temperature": 2.0, "max_tokens": 9}},
    },
    {"name": "m:cold", "aliases": []},
]
MEANT = {
    "m": ("m", {}), "em": ("m", {}), "m:hot": ("m", {"temperature": 2.0, "max_tokens": 9}),
    "em:latest": ("m", {}), "em:sql": ("m:sql", {}),
    "m:cold": ("m:cold", {}), "m:none": None, "hot": None, "": None,
}  # fmt: skip


@pytest.mark.parametrize(("name", "meant"), MEANT.items(), ids=MEANT)
def test_name_of_a_model_may_have_a_preset_or_an_adapter(
    name: str, meant: tuple[str, object] | None
) -> None:
    found = model_meant({"models": ROWS}, name)
    assert (found and (found.name, found.preset)) == meant


def test_preset_stands_below_what_was_given() -> None:
    preset = {"temperature": 2.0, "seed": 7, "chat_template_kwargs": {"a": 1, "b": 2}}
    given = {"temperature": 0.5, "seed": None, "stop": None, "chat_template_kwargs": {"b": 3}}
    assert below(preset, given) == {
        "temperature": 0.5, "seed": 7, "stop": None, "chat_template_kwargs": {"a": 1, "b": 3},
    }  # fmt: skip
    assert below({}, {"seed": 1})["chat_template_kwargs"] is None


def test_pictures_go_with_one_turn(tmp_path: Path) -> None:
    (tmp_path / "two words.png").write_bytes(PNG)
    picture = read_picture(f"'{tmp_path}/two words.png'")
    assert read_picture(str(tmp_path).replace("/", "\\/") + "/two\\ words.png") == picture
    conversation = talk("one", "1")
    conversation.attached = [picture]
    asked = [picture, {"type": "text", "text": "look"}]
    assert conversation.to_send(conversation.ask("look"))[-1]["content"] == asked
    again = conversation.ask_again()
    assert again is not None
    conversation.take(again, "2")
    assert conversation.to_send(conversation.ask("and now?"))[-1]["content"] == "and now?"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("none.png", "cannot read the picture .*none.png: No such file or directory"),
        (".", "cannot read the picture .*: it is a folder, not a regular file"),
        ("pipe", "cannot read the picture .*pipe: it is a named pipe"),
        ("text.png", "text.png must be PNG, JPEG, .*, not something else"),
        ("empty.png", "empty.png must be a picture, not empty"),
        ("large.png", "more than the 20 MiB"),
        ("\0", "null"),
    ],
)
def test_a_file_that_is_no_picture_is_refused(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").touch()
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large.png", "wb") as file:
        file.truncate(20 * 2**20 + 1)
    with pytest.raises(CliError, match=error):
        read_picture(f"{tmp_path}/{name}")


def test_files_are_completed_behind_the_commands_that_take_one(tmp_path: Path) -> None:
    (tmp_path / "cat.png").touch()
    completer = Commands(["/image", "/set"])

    def completed(typed: str) -> list[str]:
        found = completer.get_completions(Document(typed), CompleteEvent())
        return [one.text for one in found]

    assert completed("/im") == ["/image"]
    assert completed(f"/image {tmp_path}/c") == ["at.png"]
    assert completed(f"/set {tmp_path}/c") == []


def test_history_is_kept_for_its_owner_alone_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / ".mlxsup" / "history"
    assert list(History(path).load_history_strings()) == []
    for entry in ("Hällo\nwörld", " ", "two\udc80"):
        History(path).store_string(entry)
    assert list(History(path).load_history_strings()) == ["two?", "Hällo\nwörld"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for number in range(20):
        History(path).store_string(f"{number} {'x' * (HISTORY_BYTES // 16)}\nand its end")
    entries = list(History(path).load_history_strings())
    assert [entry.split()[0] for entry in entries] == [str(number) for number in range(19, 12, -1)]
    assert path.stat().st_size < HISTORY_BYTES
    History(path / "below a file").store_string("kept nowhere")


@pytest.mark.parametrize("is_early", [True, False])
def test_an_interrupt_cancels_the_answer_even_before_there_is_one(is_early: bool) -> None:
    answer, before = Mock(), signal.getsignal(signal.SIGINT)
    with interrupts_cancel() as cancelled:
        if is_early:
            signal.raise_signal(signal.SIGINT)
        cancelled(answer)
        assert answer.cancel.call_count == is_early
        if not is_early:
            signal.raise_signal(signal.SIGINT)
    assert answer.cancel.call_count == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_picture_is_refused_only_to_a_model_that_is_known_to_take_text_only() -> None:
    known = {"sees": ["text", "images"], "reads": ["text"], "unread": []}
    rows = [{"name": n, "aliases": [], "capabilities": taken} for n, taken in known.items()]
    for model in ("sees", "unread"):
        check_taker({"models": rows}, model)
    with pytest.raises(CliError, match="reads takes text only") as refused:
        check_taker({"models": rows}, "reads")
    assert refused.value.hint == "show it to sees"
