"""An idle worker frees what nobody needs, and says so, while it keeps what who comes back needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxsup.worker.idle_time import GIVE_BACK_AFTER_S

from support.daemon import Daemon, row
from support.eventually import TIMEOUT_S, eventually
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


def test_an_idle_worker_frees_its_memory_for_reuse_and_keeps_known_prompts(tmp_path: Path) -> None:
    """Long before it frees these as well, and without being asked."""
    assert GIVE_BACK_AFTER_S > 2 * TIMEOUT_S
    folder = make_tiny_model(tmp_path / "tiny")
    models: dict[str, dict[str, Any]] = {"m": {"path": str(folder), "prefix_cache": "64MiB"}}
    with Daemon(models) as daemon, daemon.client() as client:
        prompt = "tell me about the memory of other models " * 20
        first = client.complete("m", prompt=prompt, max_tokens=32)
        eventually(lambda: (seen := row(client, "m"))["cache_bytes"] == 0 < seen["prefix_bytes"])
        again = client.complete("m", prompt=prompt, max_tokens=32)
        assert again.usage.cached_tokens > 0
        assert again.token_ids == first.token_ids
