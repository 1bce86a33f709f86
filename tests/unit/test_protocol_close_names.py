"""Names that somebody may have meant."""

from __future__ import annotations

from mlxsup.protocol.close_names import close_names


def test_the_case_of_a_name_does_not_matter_and_the_likest_comes_first() -> None:
    known = ["Qwen3-8B", "smollm2", "smol", "gemma"]
    assert close_names("SMOLLM", known) == ["smollm2", "smol"]
    assert close_names("qwen3-8b", known) == ["Qwen3-8B"]
    assert close_names("SMOLLM", known, most=1) == ["smollm2"]
    assert close_names("nothing like it", known) == []
    assert close_names("", known) == []
