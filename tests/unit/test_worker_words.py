"""What a worker prints, logs, refuses to start with, and beats: word for word."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
from collections.abc import Iterator
from typing import Any

import pytest

from mlxsup.protocol.states import WorkerPhase
from mlxsup.protocol.text import log_line
from mlxsup.protocol.worker_messages import Heartbeat
from mlxsup.worker.bootstrap import LaunchError, check_spec, read_launch_spec
from mlxsup.worker.engine import EngineBytes
from mlxsup.worker.heartbeat import Board, Books
from mlxsup.worker.logs import LEVELS, LineFormatter, configure

from support.launch_specs import SPEC

# ---------------------------------------------------------------- the log


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxsup")
    before = (root.handlers[:], root.level, ours.level, logging.raiseExceptions)
    yield
    root.handlers[:], level, our_level, logging.raiseExceptions = before
    root.setLevel(level)
    ours.setLevel(our_level)


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
@pytest.mark.usefixtures("restored_logging")
def test_our_lines_have_the_level_asked_for_and_others_warn(level: str, heard: list[str]) -> None:
    stream = io.StringIO()
    logging.getLogger().setLevel(logging.DEBUG)
    configure(level, stream)
    configure(level, stream)
    assert not logging.raiseExceptions
    for name in LEVELS:
        logging.getLogger("mlxsup.worker.x").log(LEVELS[name], name)
        logging.getLogger("other").log(LEVELS[name], "other %s", name)
    words = [said.split(" ", 2)[2] for said in stream.getvalue().splitlines()]
    assert [word for word in words if not word.startswith("other")] == heard
    assert [word for word in words if word.startswith("other")] == ["other warning", "other error"]


def test_the_time_of_a_line_is_utc_to_the_millisecond() -> None:
    record = logging.makeLogRecord(
        {"created": 1e9 + 0.0429, "msecs": 42.9, "levelname": "INFO", "msg": "said"}
    )
    assert LineFormatter().format(record) == "2001-09-09T01:46:40.042Z INFO said"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("word", "word"),
        ("", '""'),
        ("two words", '"two words"'),
        ("a\tb", '"a\\tb"'),
        ('say "x"', '"say \\"x\\""'),
        ('"', '"\\""'),
        ("a=b", '"a=b"'),
        ("é x", '"é x"'),
        (1.23456, "1.235"),
        (3, "3"),
        (None, "None"),
    ],
)
def test_facts_are_quoted_if_they_have_to_be(value: object, shown: str) -> None:
    assert log_line("said", fact=value, n=1) == f"said fact={shown} n=1"
    assert log_line("said") == "said"


# ---------------------------------------------------------------- the launch spec


@pytest.mark.parametrize(
    ("name", "expected", "wrong", "right"),
    [
        ("model", "a name", ("", 3), ("m",)),
        ("generation", "an integer from 1", (0, True, 1.0), (1,)),
        ("token", "text", ("", None), ("t",)),
        ("endpoint", "an ipc:// endpoint", ("ipc://", "tcp://x", 3), ("ipc://x",)),
        ("supervisor_pid", "a process id", (0, "1"), (1,)),
        ("engine", "mlx or fake", ("torch",), ("mlx", "fake")),
        ("path", "a folder", (None,), ("",)),
        ("max_concurrency", "an integer from 1", (0,), (1,)),
        ("step_timeout_s", "a number above 0",
         (0, -1.0, float("inf"), float("nan"), True, "1"), (1, 0.001, 1e300)),
        ("decode_stall_target_ms", "a number above 0", (0,), (1, 0.5)),
        ("context_length", "an integer from 0", (-1, None), (0, 1)),
        ("deterministic", "true or false", (0, None), (True, False)),
        ("memory_limit_bytes", "bytes or null", (-1, 0.5), (0, None)),
        ("cache_limit_bytes", "bytes or null", (-1,), (0, None)),
        ("wired_limit_bytes", "bytes or null", (-1,), (0, None)),
        ("prefix_cache_bytes", "bytes or null", (-1,), (0, None)),
        ("known_batching", "a map of text or null",
         ([], "x", {"a": 1}, {"a": "x", "b": None}), (None, {}, {"a": "x"})),
        ("learned_dir", "a folder or null", (1, []), (None, "", "/x")),
        ("sampling", "a map of parameters in their ranges",
         (None, [], {"seed": 1}, {"top_p": 0}, {"top_p": 1.5, "top_k": 1}, {"top_k": 1, "x": 1}),
         ({}, {"top_p": 1.0, "top_k": 0})),
        ("log_level", "debug, info, warning, error", ("loud", None), tuple(LEVELS)),
        ("fake", "a map", (None, []), ({}, {"x": 1})),
    ],
)  # fmt: skip
def test_each_key_takes_what_it_says(
    name: str, expected: str, wrong: tuple[Any, ...], right: tuple[Any, ...]
) -> None:
    for value in right:
        check_spec(dataclasses.replace(SPEC, **{name: value}))
    for value in wrong:
        with pytest.raises(LaunchError) as caught:
            check_spec(dataclasses.replace(SPEC, **{name: value}))
        assert str(caught.value) == f"the launch spec is wrong: {name} takes {expected}"


def test_a_socket_path_has_at_most_103_bytes() -> None:
    check_spec(dataclasses.replace(SPEC, endpoint="ipc://" + "x" * 103))
    with pytest.raises(LaunchError, match=r"^the launch spec is wrong: the socket path x+ has 104"):
        check_spec(dataclasses.replace(SPEC, endpoint="ipc://" + "x" * 104))


def test_an_input_that_cannot_be_read_says_why() -> None:
    folder = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(LaunchError) as caught:
            read_launch_spec(folder)
    finally:
        os.close(folder)
    assert str(caught.value) == "standard input cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "there is no launch spec on standard input: workers are started by `mlxsup start`"),
        (b"{", "the launch spec on standard input is wrong: a launch spec is one line of JSON of "
               "at most 64 KiB"),
        (dataclasses.replace(SPEC, token="").to_line(),
         "the launch spec is wrong: token takes text"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_input_is_one_sentence(written: bytes, message: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, written)
    os.close(writer)
    try:
        with pytest.raises(LaunchError) as caught:
            read_launch_spec(reader)
    finally:
        os.close(reader)
    assert str(caught.value) == message


# ---------------------------------------------------------------- beats


def test_a_beat_holds_all_that_was_published_F11() -> None:
    now = [10.0]
    board = Board(clock=lambda: now[0])
    assert board.beat() == Heartbeat(step=0, phase=WorkerPhase.LOADING, phase_s=0.0)
    board.publish(
        WorkerPhase.PREFILL,
        step=3,
        predicted_s=0.5,
        books=Books(requests=4, preparing=1, sent=8, received=9),
        held=EngineBytes(active=5, cache=6, peak=7),
        prefill_chunk=11,
    )
    now[0] = 12.5
    whole = {
        "requests": 4, "preparing": 1, "sent": 8, "received": 9, "active_bytes": 5,
        "cache_bytes": 6, "peak_bytes": 7, "prefill_chunk": 11,
    }  # fmt: skip
    assert board.beat() == Heartbeat(
        step=3, phase=WorkerPhase.PREFILL, phase_s=2.5, predicted_s=0.5, **whole
    )
    board.publish(WorkerPhase.ROWS, step=4)
    now[0] = 12.0  # a clock that was set back
    assert board.beat() == Heartbeat(step=4, phase=WorkerPhase.ROWS, phase_s=0.0, **whole)
    board.publish(WorkerPhase.IDLE, step=4, books=Books(), held=EngineBytes(), prefill_chunk=0)
    assert board.beat() == Heartbeat(step=4, phase=WorkerPhase.IDLE, phase_s=0.0)
