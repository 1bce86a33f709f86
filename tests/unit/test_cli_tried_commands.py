"""No command can be forgotten: what each prints in a pipe and with --json is tried by a test."""

from __future__ import annotations

import pytest

from support.command_tree import leaf_of, leaves
from support.named_tests import source_of
from support.tried_commands import ELSEWHERE, FOLLOWING, ONCE

PLAIN = ("check_plain(", "\\x1b", "ESCAPE.search(")
"""How a test may look for escape bytes."""


def test_every_command_is_tried_in_a_pipe_and_with_json_by_the_tables_or_by_a_named_test() -> None:
    tried = {leaf_of(arguments) for arguments in ONCE + FOLLOWING}
    assert tried | set(ELSEWHERE) == set(leaves())
    assert tried & set(ELSEWHERE) == set(), "an exemption that is not needed hides the next gap"


def test_the_tables_are_what_the_conventions_try() -> None:
    file = "integration/test_cli_conventions.py"
    for name, table, checks in (
        ("test_in_a_pipe_data_goes_to_stdout_plain_and_whole", "ONCE", ["check_plain("]),
        ("test_json_is_one_object_or_lines_of_objects", "ONCE", ["problems("]),
        (
            "test_following_writes_a_line_for_each_change_and_nothing_over_it",
            "FOLLOWING",
            ["check_plain(", "problems("],
        ),
    ):
        source = source_of(f"{file}::{name}")
        assert f'parametrize("arguments", {table}, ' in source
        assert all(check in source for check in checks)


@pytest.mark.parametrize("leaf", ELSEWHERE, ids=" ".join)
def test_a_named_test_is_there_and_holds_both_outputs_against_the_conventions(
    leaf: tuple[str, ...],
) -> None:
    source = "\n".join(map(source_of, ELSEWHERE[leaf]))
    assert "problems(" in source
    assert any(sign in source for sign in PLAIN)


def test_a_command_line_is_that_of_its_leaf_whatever_else_it_is_called() -> None:
    assert leaf_of(["key", "new", "laptop"]) == ("key", "new")
    assert leaf_of(["ls", "--json"]) == ("models",)
    with pytest.raises(ValueError, match="not enough"):
        leaf_of(["service"])
    with pytest.raises(AssertionError, match="there is no test"):
        source_of("unit/test_cli_tried_commands.py::test_nothing")
