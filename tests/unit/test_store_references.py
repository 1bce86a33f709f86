"""Which model a user means."""

from __future__ import annotations

import re

import pytest

from mlxsup.store.references import RefusedModelError, find_source, repository_named


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("nothing", "no model on this machine is called 'nothing'"),
        ("", "no model on this machine is called ''"),
        ("./nothing", "there is nothing at /"),
        ("x.gguf", "there is nothing at /"),
        ("https://h.example/datasets/a/b", "is the address of a dataset"),
        ("https://h.example/a/b/resolve/main/q.gguf", "is the address of one file"),
        ("https://h.example/a", "names no model"),
        ("h.example/../..", "names no model"),
    ],
)
def test_name_of_no_model_is_refused(named: str, says: str) -> None:
    with pytest.raises(RefusedModelError, match=re.escape(says)):
        find_source(named)


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("a/b", ("a/b", "main")),
        ("https://h.example/a/b", ("a/b", "main")),
        ("https://h.example/a/b/", ("a/b", "main")),
        ("h.example/a/b?x=1", ("a/b", "main")),
        ("https://h.example/a/b/tree/v2", ("a/b", "v2")),
        ("https://h.example/a/b/blob/v2/config.json", ("a/b", "v2")),
        ("b", ("", "")),
    ],
)
def test_repository_is_read_from_its_name_or_address(named: str, found: tuple[str, str]) -> None:
    assert repository_named(named) == found
