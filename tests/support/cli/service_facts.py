"""Facts of a service, for tests of the files that are made of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxsup.cli.service import ServiceFacts


def facts(**changes: Any) -> ServiceFacts:
    """Those of the user alice; `changes` replace fields."""
    home = changes.get("home", Path("/home/alice"))
    alice = ServiceFacts(
        program=home / ".local/bin/mlxsup",
        config=home / ".config/mlxsup/config.toml",
        home=home,
        user="alice",
        is_system=False,
        drain_s=30.0,
        runtime_dir=home / ".mlxsup/run",
        log_dir=home / ".mlxsup/logs",
        model_cache=home / ".cache/huggingface/hub",
    )
    return replace(alice, **changes)


def mac_facts(**changes: Any) -> ServiceFacts:
    """The same on a Mac."""
    return facts(home=Path("/Users/alice"), **changes)
