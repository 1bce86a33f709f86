"""Pictures through a whole daemon: client, supervisor, worker, and a worker that is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from mlxsup.client import RequestError

pytest.importorskip("mlx_vlm")

from support.client.lossy import LossyDaemon
from support.client.streams import Reader
from support.daemon.daemon import Daemon, row
from support.models.tiny_vision import FAMILIES, asked, make_tiny_vision, picture

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(900)]

TOKENS = 40


def test_pictures_are_answered_and_an_answer_outlives_its_worker(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "sight")
    chats = [[asked("what is it", picture(seed))] for seed in (1, 2)]
    with Daemon({"sight": {"path": str(folder)}}) as daemon, daemon.client() as client:
        client.load("sight")
        assert row(client, "sight")["capabilities"] == ["text", "images"]
        one, two = (
            client.complete("sight", messages=chat, max_tokens=TOKENS).token_ids for chat in chats
        )
        assert one != two
        whole = client.complete("sight", messages=chats[0], max_tokens=1000)
        reader = Reader(client, "sight", messages=chats[0], max_tokens=1000)
        reader.started()
        os.kill(row(client, "sight")["pid"], signal.SIGKILL)
        resumed = reader.finished(600)
        assert resumed.token_ids == whole.token_ids
        assert resumed.token_ids[:TOKENS] == one
        assert row(client, "sight")["generation"] == 2
        bad: list[dict[str, Any]] = [asked("what is it", b"no picture")]
        with pytest.raises(RequestError, match="no picture that can be opened"):
            client.complete("sight", messages=bad, max_tokens=2)
        text = daemon.log_text()
        assert "IHDR" not in text


@pytest.mark.parametrize(
    "family",
    [
        name if name == "qwen3_vl" else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_a_worker_that_dies_while_its_tower_looks_costs_no_token(
    family: str, tmp_path: Path
) -> None:
    folder = make_tiny_vision(tmp_path / "sight", family)
    said: list[dict[str, Any]] = [{"role": "user", "content": "tell me a story of the sea"}]
    seen = [asked("what is it", picture(1))]
    with (
        LossyDaemon("tower", {"sight": {"path": str(folder)}}) as daemon,
        daemon.client() as client,
    ):
        client.load("sight")
        beside = Reader(client, "sight", messages=said, max_tokens=1000).started()
        answer = client.complete("sight", messages=seen, max_tokens=TOKENS)
        assert daemon.struck.exists()
        assert row(client, "sight")["generation"] == 2
        assert row(client, "sight")["last_exit"]["signal"] == "SIGKILL"
        client.restart("sight")  # so that nothing is kept of the picture
        for messages, found in ((seen, answer), (said, beside.finished(600))):
            again = client.complete("sight", messages=messages, max_tokens=len(found.token_ids))
            assert again.token_ids == found.token_ids
