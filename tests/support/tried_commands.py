"""Command lines that are tried by the conventions, and where the commands without one are tried."""

from __future__ import annotations

from collections.abc import Mapping

from .command_tree import Leaf

ONCE: list[list[str]] = [
    ["status"],
    ["status", "--debug"],
    ["reload"],
    ["reload", "--dry-run"],
    ["log-level", "info"],
    ["load", "alpha"],
    ["unload", "beta"],
    ["restart", "alpha", "--now"],
    ["restart", "alpha"],
    ["generate", "alpha", "hello", "--max-tokens", "3", "-v"],
    ["chat", "alpha", "--max-tokens", "3", "-v"],
    ["run", "brief"],
    ["requests"],
    ["requests", "--client", "nobody"],
    ["why"],
    ["why", "alpha"],
    ["why", "broken"],
    ["logs"],
    ["logs", "alpha", "-n", "3"],
    ["logs", "alpha", "--since", "10m"],
    ["logs", "alpha", "--previous"],
    ["key", "new", "laptop"],
    ["key", "list"],
    ["key", "revoke", "old"],
    ["key", "off", "--yes"],
    ["wait", "alpha"],
    ["bench", "alpha", "--prompt-tokens", "4", "--output-tokens", "4", "--concurrency", "2"],
    ["config", "check", "SOUND"],
    ["config", "path", "--config", "CONFIG"],
    ["config", "schema"],
    ["plan", "--config", "CONFIG"],
    ["models", "--config", "CONFIG"],
    ["ls", "--config", "CONFIG"],
    ["show", "MODEL"],
    ["init", "NEW"],
    ["completion", "bash"],
    ["completion", "zsh"],
    ["completion", "fish"],
]
"""Commands that end by themselves, in this order; each is run in a pipe, and with --json."""

FOLLOWING: list[list[str]] = [
    ["status", "--watch"],
    ["events"],
    ["logs", "alpha", "-f"],
    ["top"],
    ["requests", "-f"],
]
"""Every command that runs until it is interrupted, except `start`; run in the same two ways."""

_EVERY = "integration/test_cli_every_command.py"
_CONVENTIONS = "integration/test_cli_conventions.py"
_CONTROLS = (
    f"{_CONVENTIONS}::test_pause_resume_and_cancel_in_a_pipe_say_in_one_line_what_has_become_of"
    "_the_request"
)

ELSEWHERE: Mapping[Leaf, tuple[str, ...]] = {
    ("start",): (
        f"{_EVERY}::test_start_in_the_foreground_writes_lines_as_published",
        f"{_CONVENTIONS}::test_start_and_stop_in_a_pipe_speak_in_plain_lines",
    ),
    ("stop",): (f"{_CONVENTIONS}::test_start_and_stop_in_a_pipe_speak_in_plain_lines",),
    ("attach",): (f"{_EVERY}::test_attach_prints_the_answer_plain_and_as_published",),
    ("cancel",): (_CONTROLS,),
    ("pause",): (_CONTROLS,),
    ("resume",): (_CONTROLS,),
    ("prioritize",): (
        f"{_CONVENTIONS}::test_prioritize_in_a_pipe_says_what_has_become_of_the_request",
    ),
    ("doctor",): (
        "integration/test_cli_doctor.py::test_a_sound_machine_has_no_problem_and_is_left_as_it_is",
    ),
    ("connect",): (
        "integration/test_cli_connect.py"
        "::test_it_prints_what_belongs_into_the_file_and_writes_nothing",
    ),
    ("demo",): (
        "integration/test_cli_demo.py::test_a_worker_dies_three_times_and_neither_answer_changes",
        "integration/test_cli_demo.py"
        "::test_its_story_is_plain_in_a_pipe_and_a_running_daemon_is_left_alone",
    ),
    ("pull",): (f"{_EVERY}::test_pull_and_rm_are_plain_and_as_published",),
    ("rm",): (f"{_EVERY}::test_pull_and_rm_are_plain_and_as_published",),
    ("convert",): (
        "integration/test_cli_convert.py::test_a_folder_is_quantised_into_a_new_one_that_is_served",
        "integration/test_cli_convert.py::test_a_repository_of_the_cache_is_read_where_it_is",
    ),
    ("service", "install"): (f"{_EVERY}::test_a_service_is_told_of_plain_and_as_published",),
    ("service", "uninstall"): (f"{_EVERY}::test_a_service_is_told_of_plain_and_as_published",),
    ("service", "status"): (f"{_EVERY}::test_a_service_is_told_of_plain_and_as_published",),
    ("service", "logs"): (
        "integration/test_cli_service.py::test_logs_are_those_of_the_unit",
        f"{_EVERY}::test_a_service_is_told_of_plain_and_as_published",
    ),
}
"""Commands that need other surroundings, with the tests that hold both of their outputs against
the conventions."""
