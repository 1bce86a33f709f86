"""What a process imports that has no model yet."""

from __future__ import annotations

import importlib

import pytest

from mlxsup.worker.engines.mlx.imports import MODULES, OWN_MODULES, import_everything


def test_the_libraries_come_first_and_then_our_own_modules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(importlib, "import_module", lambda *names: asked.append(names))
    import_everything()
    package = "mlxsup.worker.engines.mlx"
    assert asked[: len(MODULES)] == [(name,) for name in MODULES]
    assert asked[len(MODULES) :] == [(f".{name}", package) for name in OWN_MODULES]


def test_a_library_that_is_missing_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*names: str) -> None:
        raise ImportError("no " + names[0])

    monkeypatch.setattr(importlib, "import_module", refuse)
    with pytest.raises(ImportError, match=r"^no mlx\.core$"):
        import_everything()
