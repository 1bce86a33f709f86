"""Before a worker's life: the launch spec, the exit codes, the log's lines."""

import dataclasses
import io
import logging
import os
import re
import signal
import threading
from typing import Any

import pytest

from mlxsup.protocol.launch import MAX_LAUNCH_SPEC_BYTES, LaunchSpec
from mlxsup.protocol.text import log_line
from mlxsup.worker.bootstrap import LaunchError, check_spec, read_launch_spec
from mlxsup.worker.engine import (
    BadLaunchError,
    BadModelError,
    GpuFaultElsewhereError,
    ModelMissingError,
    NoDeviceError,
)
from mlxsup.worker.link import Link, LinkBrokenError
from mlxsup.worker.logs import LineFormatter
from mlxsup.worker.parent_watch import OrphanedError, check_parent
from mlxsup.worker.preparing import StuckPreprocessingError
from mlxsup.worker.process import TerminatedError, TerminationHandler, judge


def spec(**changes: Any) -> LaunchSpec:
    """A launch spec as it should be, but for the changes."""
    values: dict[str, Any] = {
        "model": "m",
        "generation": 1,
        "token": "t",
        "endpoint": "ipc:///tmp/x.sock",
        "supervisor_pid": 1,
        "engine": "fake",
        "path": "/x",
        "max_concurrency": 4,
        "step_timeout_s": 30.0,
        "decode_stall_target_ms": 250,
    }
    return LaunchSpec(**(values | changes))


def read(written: bytes) -> LaunchSpec:
    """What a worker reads from a pipe that stays open."""
    reader, writer = os.pipe()
    try:
        os.write(writer, written)
        return read_launch_spec(reader)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_spec_is_read_while_the_pipe_stays_open() -> None:
    assert read(spec().to_line()) == spec()


def test_a_spec_may_come_in_pieces_and_nothing_behind_it_is_waited_for() -> None:
    line = spec().to_line()
    reader, writer = os.pipe()
    try:
        os.write(writer, line[:100])
        rest = threading.Timer(0.05, os.write, (writer, line[100:]))
        rest.start()
        assert read_launch_spec(reader) == spec()
        rest.join()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("written", "words"),
    [(b"", "there is no launch spec"), (spec().to_line()[:-1], "one line of JSON")],
)
def test_an_input_that_ends_before_the_line_does_is_said(written: bytes, words: str) -> None:
    reader, writer = os.pipe()
    try:
        os.write(writer, written)
        os.close(writer)
        with pytest.raises(LaunchError, match=words):
            read_launch_spec(reader)
    finally:
        os.close(reader)


def test_a_line_without_an_end_is_refused_while_the_pipe_stays_open() -> None:
    reader, writer = os.pipe()
    try:
        endless = threading.Thread(
            target=os.write, args=(writer, b" " * (MAX_LAUNCH_SPEC_BYTES + 1))
        )
        endless.start()
        with pytest.raises(LaunchError, match="at most 64 KiB"):
            read_launch_spec(reader)
        endless.join()
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("written", [b"[]\n", b"{}\n", b"nonsense\n", b'"x"\n'])
def test_what_is_no_spec_is_refused(written: bytes) -> None:
    with pytest.raises(LaunchError, match="launch spec"):
        read(written)


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("model", "", "a name"),
        ("generation", 0, "an integer from 1"),
        ("generation", True, "an integer from 1"),
        ("token", "", "text"),
        ("endpoint", "tcp://x:1", "an ipc:// endpoint"),
        ("endpoint", "ipc://", "an ipc:// endpoint"),
        ("supervisor_pid", -1, "a process id"),
        ("known_batching", {"reason": 1}, "a map of text or null"),
        ("learned_dir", 1, "a folder or null"),
        ("engine", "torch", "mlx or fake"),
        ("path", None, "a folder"),
        ("max_concurrency", 0, "an integer from 1"),
        ("step_timeout_s", 0, "a number above 0"),
        ("step_timeout_s", "30", "a number above 0"),
        ("step_timeout_s", True, "a number above 0"),
        ("step_timeout_s", float("inf"), "a number above 0"),
        ("decode_stall_target_ms", 0, "a number above 0"),
        ("context_length", -1, "an integer from 0"),
        ("log_level", "loud", "debug, info, warning, error"),
        ("fake", [], "a map"),
        ("deterministic", 1, "true or false"),
        ("memory_limit_bytes", -1, "bytes or null"),
        ("cache_limit_bytes", "1GiB", "bytes or null"),
        ("wired_limit_bytes", 0.5, "bytes or null"),
        ("prefix_cache_bytes", -1, "bytes or null"),
        ("prefix_cache_bytes", "auto", "bytes or null"),
        ("sampling", {"temperature": 11}, "a map of parameters in their ranges"),
        ("sampling", {"seed": 1}, "a map of parameters in their ranges"),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, takes: str) -> None:
    wrong = dataclasses.replace(spec(), **{name: value})
    with pytest.raises(LaunchError, match=f"^the launch spec is wrong: {name} takes {takes}$"):
        check_spec(wrong)


def test_the_least_that_a_spec_may_ask_for_is_taken() -> None:
    check_spec(spec(generation=1, max_concurrency=1, context_length=0, memory_limit_bytes=0))
    check_spec(spec(step_timeout_s=0.001))


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_every_log_level_of_the_configuration_is_taken(level: str) -> None:
    check_spec(spec(log_level=level))


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    with pytest.raises(LaunchError, match="103"):
        check_spec(spec(endpoint=f"ipc:///{'x' * 120}"))


@pytest.mark.parametrize(
    ("error", "code", "is_expected"),
    [
        (ModelMissingError("gone"), 66, True),
        (BadModelError("bad"), 65, True),
        (BadLaunchError("more than fits"), 64, True),
        (NoDeviceError("none"), 69, True),
        (GpuFaultElsewhereError("innocent"), 72, True),
        (MemoryError(), 75, True),
        (StuckPreprocessingError("too long"), 73, True),
        (LinkBrokenError("odd"), 76, True),
        (TerminatedError("term"), 143, True),
        (ValueError("odd"), 70, False),
        (RecursionError(), 70, False),
        (SystemExit(0), 70, False),
    ],
)
def test_every_exception_has_an_exit_code(
    error: BaseException, code: int, is_expected: bool
) -> None:
    death = judge(error)
    assert (death.code, death.is_expected) == (code, is_expected)
    assert death.message


@pytest.mark.parametrize("kind", [BadModelError, MemoryError, ValueError])
def test_a_cause_is_one_line_of_bounded_length(kind: type[Exception]) -> None:
    death = judge(kind("incompatible arguments:\n    1. rope()\n\n" + "x" * 9000))
    assert "incompatible arguments: 1. rope() xxx" in death.message
    assert ("\n" not in death.message, len(death.message)) == (True, 500)


def test_a_sigterm_before_the_load_still_interrupts_it_B9() -> None:
    link = Link("ipc:///tmp/mlxsup-nobody-listens")
    handler = TerminationHandler(link)
    handler(signal.SIGTERM, None)
    assert handler.has_come()
    with pytest.raises(TerminatedError):
        handler.interrupt_from_now_on()
    handler(signal.SIGTERM, None)  # the death under way is not interrupted by a second one
    link.close(0.0)


def test_another_parent_is_noticed_E6() -> None:
    check_parent(os.getppid())
    with pytest.raises(OrphanedError):
        check_parent(os.getppid() + 1)


def test_log_lines_have_time_level_message_and_facts() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.info(log_line("model ready", model="a b", seconds=1.5, code=3))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO "
        r'model ready model="a b" seconds=1.500 code=3\n',
        stream.getvalue(),
    )
