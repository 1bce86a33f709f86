"""News of a daemon for a reader that may be held up: bounded, in order, and never outdated."""

from __future__ import annotations

from mlxsup.cli.exit_status import CliError
from mlxsup.cli.top.facts import Changed, Looked, Lost
from mlxsup.cli.top.follower import MAX_CHANGES, Mailbox

from support.top_facts import looked, model


def change(number: int) -> Changed:
    return Changed(change={"number": number})


def test_only_the_latest_look_is_kept_and_changes_keep_their_order() -> None:
    mailbox = Mailbox(lambda: None)
    first, second = looked([model("a")]), looked([model("b")])
    for news in (change(1), first, change(2), second, change(3)):
        mailbox.put(news)
    assert mailbox.take() == [change(1), change(2), second, change(3)]
    assert mailbox.take() == []


def test_a_look_and_a_loss_wake_the_reader_and_a_change_waits_for_them() -> None:
    woken: list[None] = []
    mailbox = Mailbox(lambda: woken.append(None))
    mailbox.put(change(1))
    assert woken == []
    mailbox.put(looked([]))
    mailbox.put(Lost(at=0.0, error=CliError("gone")))
    assert len(woken) == 2


def test_what_nobody_takes_is_bounded_and_the_latest_look_survives() -> None:
    mailbox = Mailbox(lambda: None)
    for number in range(3 * MAX_CHANGES):
        mailbox.put(change(number))
        mailbox.put(looked([model(f"m{number}")]))
    taken = mailbox.take()
    assert len(taken) <= MAX_CHANGES
    assert [one for one in taken if isinstance(one, Looked)] == [taken[-1]]
