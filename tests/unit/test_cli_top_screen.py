"""The picture of `mlxsup top`: it fits any terminal, and shows what matters in it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.memory_bar import memory_bar
from mlxsup.cli.terminal.output import styled
from mlxsup.cli.terminal.writer import for_terminal
from mlxsup.cli.terminal.writer import plain as plain_of
from mlxsup.cli.top.facts import MAX_EVENTS, Changed, Facts, Lost
from mlxsup.cli.top.keys import Controls, Order, Verb, press, see
from mlxsup.cli.top.screen import STYLES, screen
from mlxsup.cli.top.sections import Section, shared

from support.top_facts import AT, GIB, facts, looked, model, request

KILLED = {"reason": "crash", "signal": "SIGKILL", "detail": "out of memory", "at": AT}
MODELS = [
    model("alpha", running=["5f0c12ab-1"], queued=1),
    model("a-model-with-quite-a-long-name", "BACKOFF", retry_in_s=4.0, last_exit=KILLED, pid=None),
    model("cold", "STOPPED", pid=None, tokens_per_s=None, footprint_bytes=0, loaded_for_s=None),
]
REQUESTS = [
    request("5f0c12ab-1"),
    request("5f0c12ab-2", "reading"),
    request("5f0c12ab-3", "waiting"),
    request("5f0c12ab-4", "paused"),
]
WIDTHS = (40, 80, 200)


def plain(text: str, what: str) -> str:
    return text


def coloured(text: str, what: str) -> str:
    return styled(text, **STYLES.get(what, {}))


def shown(
    known: Facts, controls: Controls | None = None, *, columns: int = 80, rows: int = 24
) -> list[str]:
    controls = controls or see(Controls(), known.items())
    return screen(known, controls, columns=columns, rows=rows, style=plain)


def with_events(known: Facts, count: int) -> Facts:
    for number in range(count):
        change = {"at": AT + number, "model": "alpha", "from": "LOADING", "to": "READY"}
        known = known.after(Changed(change=change))
    return known


@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", [10, 24, 50])
def test_all_that_was_asked_for_is_there_at_any_width(columns: int, rows: int) -> None:
    lines = shown(with_events(facts(MODELS, REQUESTS), 5), columns=columns, rows=rows)
    text = "\n".join(lines)
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    assert lines[0].startswith("mlxsup 0.1.0, 3 models, 4 requests")
    assert lines[1].startswith("memory [")
    assert lines[-1].startswith("arrows select")
    for word in ("alpha", "READY", "1/1", "5f0c12ab-1", "answering", "LOADING → READY"):
        assert word in text
    if rows >= 24:
        words = ["BACKOFF", "STOPPED", "reading", "prompt 41%", "waiting", "place 1", "paused"]
        words += ["SIGKILL, out of memory"]
        words += ["93.4", "2.00 GiB", "31.5", "about 12s"] if columns >= 80 else []
        words += ["process 4711@77", "CONTEXT", "ENGINE"] if columns == 200 else []
        assert [word for word in words if word not in text] == []


@given(
    columns=st.integers(20, 220),
    rows=st.integers(1, 60),
    models=st.integers(0, 30),
    requests=st.integers(0, 40),
    events=st.integers(0, 30),
    steps=st.integers(0, 70),
    is_lost=st.booleans(),
    key=st.sampled_from(["", "?", "u", "c", "l"]),
)
def test_it_never_overflows_and_what_is_selected_is_shown(
    columns: int, rows: int, models: int, requests: int, events: int, steps: int, is_lost: bool,
    key: str,
) -> None:  # fmt: skip
    states = ("READY", "FAILED", "BACKOFF")
    known = facts(
        [model(f"m{n}", states[n % 3], last_exit=KILLED if n % 2 else None) for n in range(models)],
        [request(f"x-{n}", "waiting") for n in range(requests)],
        more=7,
    )
    known = with_events(known, events)
    if is_lost:
        known = known.after(Lost(at=AT, error=CliError("no daemon answers at ipc:///x")))
    controls = see(Controls(), known.items())
    for name in [*["down"] * steps, key]:
        controls, _ = press(controls, name)
    lines = [
        plain_of(line)
        for line in screen(known, controls, columns=columns, rows=rows, style=coloured)
    ]
    assert len(lines) == rows
    assert max(map(len, lines)) <= columns
    if controls.selected is not None and not controls.is_helping and rows >= 8:
        [marked] = [line for line in lines if line.startswith("> ")]
        assert marked.split()[1] == controls.selected.title


def test_a_state_is_a_word_and_the_selection_a_sign_without_any_colour() -> None:
    known = facts(MODELS, REQUESTS)
    controls = press(see(Controls(), known.items()), "down")[0]
    lines = shown(known, controls)
    assert [line.split()[1:3] for line in lines if line.startswith("> ")] == [["alpha", "READY"]]


def test_the_state_keeps_its_colour_unless_its_row_is_selected() -> None:
    known = facts(MODELS)
    controls = press(see(Controls(), known.items()), "down")[0]
    lines = screen(known, controls, columns=80, rows=24, style=coloured)
    text = for_terminal("\n".join(lines))
    assert "\x1b[31mBACKOFF" in text
    assert "\x1b[7m> alpha" in text


def test_a_question_and_what_was_said_stand_in_the_last_line() -> None:
    known = facts(MODELS)
    order = Order(verb=Verb.UNLOAD, item=known.items()[0])
    assert shown(known, Controls(question=order))[-1] == (
        "unload alpha? running answers finish first (y/n)"
    )
    assert shown(known, Controls(said="alpha is loaded"))[-1] == "alpha is loaded"


def test_help_names_every_key() -> None:
    text = "\n".join(shown(facts(MODELS), Controls(is_helping=True), columns=40, rows=11))
    for word in ("restart", "load", "unload", "cancel", "pause", "resume", "Ctrl-Z", "leave"):
        assert word in text


def test_a_daemon_that_is_gone_is_said_in_words_and_nothing_can_be_selected() -> None:
    known = facts(MODELS, REQUESTS).after(Lost(at=AT, error=CliError("no daemon answers at X")))
    again = known.after(Lost(at=AT + 60, error=CliError("no daemon answers at X")))
    assert again.lost_at == AT
    assert len(again.events) == 1
    lines = shown(again)
    assert lines[0] == "no daemon since 12:13:20Z, still trying: no daemon answers at X"
    assert any("alpha" in line for line in lines), "what was known last"
    assert again.items() == ()
    back = again.after(looked(MODELS, at=AT + 61))
    assert (back.lost_at, len(back.items())) == (None, 3)
    assert back.events[-1] == "12:14:21Z the daemon answers again (pid 100)"
    other = again.after(looked(MODELS, pid=101, at=AT + 61))
    assert other.events[-1] == "12:14:21Z another daemon answers (pid 101)"
    assert not other.is_same_daemon(again)


def test_the_title_counts_requests_that_nobody_has_listed() -> None:
    assert ", 11 requests, " in shown(facts(MODELS, REQUESTS, more=7))[0]


def test_what_was_known_before_a_loss_has_no_colour_of_something_that_is_so() -> None:
    known = facts(MODELS)
    for one, has_colour in ((known, True), (known.after(Lost(at=AT, error=CliError("x"))), False)):
        lines = screen(one, see(Controls(), one.items()), columns=80, rows=24, style=coloured)
        [ready] = [line for line in lines if "READY" in line]
        assert ("\x1b[32m" in ready, "\x1b[2m" in ready) == (has_colour, not has_colour)


def test_events_are_the_newest_and_bounded() -> None:
    known = with_events(facts(MODELS), MAX_EVENTS + 5)
    assert len(known.events) == MAX_EVENTS
    assert known.events[-1] in shown(known)
    assert known.events[0] not in shown(known)


def test_two_requests_with_one_id_are_told_apart_by_their_numbers() -> None:
    known = facts([], [request("a", number="#1"), request("a", number="#2"), request("b")])
    assert [one.name for one in known.items()] == ["#1", "#2", "b"]


@pytest.mark.parametrize(
    ("memory", "width", "text", "shares"),
    [
        ({}, 80, "2.00 GiB used, 6.00 GiB of 8.00 GiB reserved", (0.25, 0.75)),
        ({}, 40, "6.00 GiB of 8.00 GiB", (0.25, 0.75)),
        ({"budget_bytes": 4 * GIB}, 80, "2.00 GiB used, 6.00 GiB of 4.00 GiB reserved", (1 / 3, 1)),
        (
            {"budget_bytes": None, "reserved_bytes": 0},
            80,
            "2.00 GiB used of 64.00 GiB",
            (1 / 32, 0),
        ),
        ({}, 20, "memory 6.00 GiB of 8", None),
    ],
)
def test_the_bar_shows_what_is_used_and_reserved_of_the_budget(
    memory: dict[str, Any], width: int, text: str, shares: tuple[float, float] | None
) -> None:
    bar = memory_bar(looked([model("m")], **memory).status, width)
    assert len(bar) == width
    assert bar.endswith(text)
    if shares is not None:
        signs = bar.partition("[")[2].partition("]")[0]
        used, reserved = (round(share * len(signs)) for share in shares)
        rest = max(reserved, used)
        assert signs == "#" * used + "=" * (rest - used) + "." * (len(signs) - rest)


@given(room=st.integers(0, 60), wanted=st.lists(st.integers(0, 30), max_size=5))
def test_lines_are_shared_until_nobody_wants_more(room: int, wanted: list[int]) -> None:
    got = shared(room, wanted)
    assert all(have <= want for have, want in zip(got, wanted, strict=True))
    assert sum(got) == min(room, sum(wanted))
    assert all(have == want or have >= max(got) - 1 for have, want in zip(got, wanted, strict=True))


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    room=st.integers(0, 30),
    more=st.integers(0, 3),
    data=st.data(),
)
def test_a_section_shows_its_focus_and_counts_what_it_hides(
    sizes: list[int], room: int, more: int, data: st.DataObject
) -> None:
    focus = data.draw(st.integers(0, len(sizes) - 1))
    groups = [[f"{n}.{line}" for line in range(size)] for n, size in enumerate(sizes)]
    section = Section(header="H", groups=groups, focus=focus, more=more)
    lines = section.lines(room)
    assert len(lines) <= room
    if room:
        assert f"{focus}.0" in lines
    if room >= section.wanted:
        assert len(lines) == section.wanted
    for line in lines:
        if line.startswith("  and "):
            firsts = {one.partition(".")[0] for one in lines if "." in one}
            assert int(line.split()[1]) == len(sizes) - len(firsts) + more
