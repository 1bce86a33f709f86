"""A configuration in the working folder, next to an empty Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import DaemonConfig, load_config


def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes the cache, and an empty folder next to it the working folder; returns the cache."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return cache


def read(text: str) -> DaemonConfig:
    """What the configuration in the working folder says, once it is this text."""
    path = Path("mlxsup.toml")
    path.write_text(text)
    return load_config(path)
