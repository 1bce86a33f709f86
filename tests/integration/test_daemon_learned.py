"""A worker that follows one that was killed knows its model's pace, and the next daemon's does."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.daemon import Daemon, row
from support.streams import Reader
from support.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx

WARMED_UP = re.compile(r"model warmed up model=m rows=(\d+) pace=(\w+) ")


def test_what_a_killed_worker_has_learned_is_not_learned_again(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    with Daemon({"m": {"path": str(folder), "max_concurrency": 1}}) as daemon:
        with daemon.client() as client:
            client.load("m")
            # A prompt of 3,000 tokens has the parts of a pass told apart even on a busy machine,
            # where the warm-up leaves out its larger sizes.
            client.complete("m", prompt_tokens=[5 + n % 1000 for n in range(3000)], max_tokens=2)
            client.restart("m")
            reader = Reader(client, "m", "go on", max_tokens=3000)
            reader.started()
            os.kill(row(client, "m")["pid"], signal.SIGKILL)
            assert len(reader.finished(600).token_ids) == 3000
            assert row(client, "m")["generation"] == 3
        assert daemon.run("stop").returncode == 0
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        daemon.start()
        with daemon.client() as client:
            client.load("m")
        lives = WARMED_UP.findall((daemon.logs / "m.log").read_text())
    assert [pace for _, pace in lives] == ["measured", "learned", "learned", "learned"]
    assert [rows for rows, _ in lives[1:]] == ["1", "1", "1"], "nothing is repeated"
