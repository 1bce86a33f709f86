"""tools/check_docs.py: which command lines of the documents are wrong."""

from __future__ import annotations

import pytest

from tools.check_docs import words_of, wrong_command


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("$ mlxsup generate m --no-think | head", None),
        ("mlxsup start --http=8484 && mlxsup status", None),
        ("mlxsup ps --json", None),
        ("mlxsup help nothing", None),
        ("mlxsup key new laptop --account alice", None),
        ("mlxsup OWNER/NAME", None),
        ("mlxsup statsu", "mlxsup has no command 'statsu'"),
        ("mlxsup key make laptop", "mlxsup has no command 'key make laptop'"),
        ("mlxsup start --htp", "start has no option --htp"),
        ("mlxsup key new laptop --raw", "new has no option --raw"),
    ],
)
def test_a_command_of_a_document_exists_with_its_options(line: str, problem: str | None) -> None:
    assert wrong_command(words_of(line)[1:]) == problem
