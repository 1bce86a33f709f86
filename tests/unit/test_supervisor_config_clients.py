"""Mistakes in the tables of clients: each is named with its line, its key and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import ConfigError, load_config

M = '[models.m]\npath = "m"\n'

CLIENTS = [
    (f"clients = 3\n{M}", 1, "clients takes a table for each client, not 3"),
    (f"[clients]\na = 3\n{M}", 2, "clients.a takes a table, not 3"),
    (
        f"[clients.a]\nweigth = 2\n{M}", 2,
        "unknown key clients.a.weigth; did you mean weight?",
    ),
    (f"[clients.a]\npreload = true\n{M}", 2,
     "unknown key clients.a.preload; it belongs to [models.NAME] or [defaults]"),
    (f"{M}weight = 2\n", 3, "unknown key models.m.weight; it belongs to [clients.NAME]"),
    *(
        (f"[clients.a]\nweight = {weight}\n{M}", 2,
         f"clients.a.weight takes a number from 0.001 to 1,000, not {shown}")
        for weight, shown in (
            ("0", "0.0"), ("-1", "-1.0"), ("1001", "1001.0"), ("nan", "nan"), ("true", "true"),
        )
    ),
    (f"[clients.a]\npriority = \"urgent\"\n{M}", 2,
     'clients.a.priority takes "interactive", "normal" or "batch", not "urgent"'),
    (f"[clients.\"*\"]\nmax_priority = \"batch\"\n{M}", 1,
     'clients."*".priority takes max_priority (batch) or a lower class, not "normal"'),
    (f"[clients.a]\nmax_priority = \"normal\"\npriority = \"interactive\"\n{M}", 3,
     'clients.a.priority takes max_priority (normal) or a lower class, not "interactive"'),
    (f"[clients.a]\nmax_queue = -1\n{M}", 2,
     "clients.a.max_queue takes an integer from 0, not -1"),
    (f"[clients.a]\nmax_running = 1.5\n{M}", 2,
     "clients.a.max_running takes an integer from 0, not 1.5"),
    (f"[clients.\"process 7\"]\n{M}", 1,
     "clients.'process 7': a client's name takes 1 to 64 of the characters"
     " A-Z a-z 0-9 . _ @ : / + -, the first a letter or digit; or \"*\" for all others"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "expected"), CLIENTS)
def test_each_mistake_is_named(tmp_path: Path, text: str, line: int, expected: str) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems == [f"{path}:{line}: {expected}"]
