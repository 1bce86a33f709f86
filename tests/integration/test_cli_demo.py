"""`mlxsup demo`: crashes shown on its own daemon, which leaves nothing behind."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.cli.cli import Piped, run_cli
from support.daemon.daemon import Daemon, fake, is_alive, toml_of
from support.eventually import eventually
from support.gateway.json_schemas import problems

STEP_S = 0.05
PACED_STEP_S = 0.09
"""Slow enough that each of three kills meets an answer that runs."""

QUICK_STEP_S = 0.01
"""Where it does not matter whether they do."""

TOLD = re.compile(r"\d\d:\d\d:\d\dZ [ab]: ")
"""What is printed about a load that takes long."""


def write_config(folder: Path, *names: str, step_s: float = STEP_S) -> Path:
    """A file with these models, whose supervisor the demonstration must not use."""
    path = folder / "mlxsup.toml"
    supervisor = {"runtime_dir": "/nowhere/run", "log_dir": "/nowhere/logs"}
    entry = fake(fake={"step_s": step_s}, restart={"max_restarts": 0})
    models = {f"models.{name}": entry for name in names}
    tables: dict[str, dict[str, Any]] = {
        "supervisor": supervisor,
        "defaults": {"max_concurrency": 2},
        **models,
    }
    path.write_text(toml_of(tables))
    return path


def test_a_worker_dies_three_times_and_neither_answer_changes(tmp_path: Path) -> None:
    config = write_config(tmp_path, "a", "b", "c", step_s=PACED_STEP_S)
    done = run_cli("demo", "--config", str(config), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert problems(done.stdout, ["demo"]) == []
    shown = json.loads(done.stdout)
    assert shown["backend"] == "fake"
    assert len({kill["pid"] for kill in shown["kills"]}) == 3
    assert all(kill["ready_after_s"] > 0 for kill in shown["kills"])
    assert shown["text"]
    assert shown["answers"] == [
        {"model": "a", "tokens": 40, "resumed": 3, "is_same": True},
        {"model": "b", "tokens": 40, "resumed": 0, "is_same": True},
    ]
    assert shown["http"]["is_same"]
    assert shown["http"]["url"].startswith("http://127.0.0.1:")
    assert len(shown["http"]["killed"]) == 1
    assert not any(psutil.pid_exists(kill["pid"]) for kill in shown["kills"])


def test_its_story_is_plain_in_a_pipe_and_a_running_daemon_is_left_alone(tmp_path: Path) -> None:
    with Daemon({"mine": fake()}) as daemon, daemon.client() as client:
        config = write_config(tmp_path, "only", step_s=PACED_STEP_S)
        done = run_cli("demo", "--config", str(config), MLXSUP_ENDPOINT=daemon.endpoint)
        assert done.returncode == 0, done.stderr
        [mine] = client.status()["models"]
        assert (mine["name"], mine["generation"]) == ("mine", 1)
    assert "\x1b" not in done.stdout + done.stderr
    assert "\r" not in done.stdout + done.stderr
    assert done.stdout.count("killed pid ") == 3
    assert "only: 40 tokens, the same text as alone, resumed 3 times\n" in done.stdout
    assert "only-copy: 40 tokens, the same text as alone\n" in done.stdout
    assert re.search(
        r"\nPOST http://127\.0\.0\.1:\d+/v1/chat/completions, with kill -9", done.stdout
    )
    assert done.stdout.count("is killed after 10 pieces\n") == 1
    assert "only-copy: complete, the same text as alone\n" in done.stdout
    assert done.stdout.endswith("mlxsup stop\nevery process is gone\n")


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_it_leaves_nothing_when_given_up_either(tmp_path: Path, name: str) -> None:
    config = write_config(tmp_path, "a", "b", step_s=STEP_S if name else QUICK_STEP_S)
    with Piped("demo", "--config", str(config)) as piped:
        while "killed pid" not in (line := piped.line()):
            assert line, piped.end()
        demo = psutil.Process(piped.process.pid)
        places = [Path(str(one.laddr)) for one in demo.net_connections("unix")]
        [folder] = {place.parents[1] for place in places if place.name == "client.sock"}
        assert folder.name.startswith("mlxsup-demo-")
        processes = demo.children(recursive=True)
        if name:
            demo.send_signal(getattr(signal, name))
        code, _, err = piped.end()
    # The last two leave it no time to say or to remove anything, but no process either.
    is_sudden = name in ("SIGQUIT", "SIGKILL")
    assert code == (-getattr(signal, name) if is_sudden else 130 if name else 0)
    assert all(map(TOLD.match, err.splitlines())), err
    eventually(lambda: not any(map(is_alive, processes)))
    assert folder.exists() == is_sudden
    shutil.rmtree(folder, ignore_errors=True)


def test_a_model_that_does_not_load_says_why_and_what_helps(tmp_path: Path) -> None:
    config = tmp_path / "mlxsup.toml"
    config.write_text(toml_of({"models.a": {"path": str(tmp_path / "none")}}))
    done = run_cli("demo", "--config", str(config))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: a could not be loaded")
    assert str(tmp_path / "none") in error
    assert hint == f"hint: `mlxsup start --config {config}` shows more"
