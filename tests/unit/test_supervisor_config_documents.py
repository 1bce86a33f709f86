"""The example configuration and the tables of docs/operations.md are printed from the tables."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
AGAIN = "python tools/config_documents.py"


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("tools.config_documents")


def test_the_example_is_what_the_tables_print(documents: ModuleType) -> None:
    assert (ROOT / "config.example.toml").read_text() == documents.example(), AGAIN


def test_the_page_is_what_the_tables_print(documents: ModuleType) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert documents.with_tables(page) == page, AGAIN


def test_every_key_has_a_unit_and_a_sentence(documents: ModuleType) -> None:
    for _, table in documents.SECTIONS:
        for name, field in documents.keys(table):
            assert documents.unit(name, field), name
            assert field.title, name
