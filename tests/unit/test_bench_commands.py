"""What `python -m bench commands` measures, and how it judges it."""

from __future__ import annotations

import pytest

from bench import commands
from bench.commands import ALONE, ASK_SOMEBODY, command_lines, row, verdict
from support.command_tree import leaves


def test_every_command_of_the_table_is_measured_by_itself_or_by_its_help() -> None:
    lines = command_lines()
    for leaf in leaves():
        assert [*leaf, "-h"] in lines
        is_alone = [*leaf, *ALONE.get(leaf, ["nothing"])] in lines
        assert is_alone != (leaf[0] in ASK_SOMEBODY)
    assert ["--version"] in lines


def test_a_new_command_must_be_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "ASK_SOMEBODY", ASK_SOMEBODY - {"stop"})
    with pytest.raises(ValueError, match=r"say whether these ask somebody: \[\('stop',\)\]"):
        command_lines()


def test_the_median_counts() -> None:
    assert verdict([0.05, 0.1, 9.0], 0.1) == "kept"
    assert verdict([0.05, 0.101, 0.2], 0.1) == "MISSED"
    assert row("x", [0.05, 0.1, 0.2], 0.1) == ["x", "100 (50 to 200) ms", "≤100 ms", "kept"]
