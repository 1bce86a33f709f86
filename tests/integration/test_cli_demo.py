"""`mlxsup demo`: crashes shown on its own daemon, which leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import psutil

from support.cli.cli import Piped, check_plain, run_cli
from support.daemon.daemon import fake, is_alive, toml_of
from support.eventually import eventually
from support.gateway.json_schemas import problems

STEP_S = 0.05
PACED_STEP_S = 0.09
"""Slow enough that each of three kills meets an answer that runs."""

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


def test_worker_dies_three_times_and_neither_answer_changes(tmp_path: Path) -> None:
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
    assert not any(psutil.pid_exists(kill["pid"]) for kill in shown["kills"])


def test_story_of_the_demo_is_plain_in_a_pipe_and_asks_no_other_daemon(tmp_path: Path) -> None:
    config = write_config(tmp_path, "only", step_s=PACED_STEP_S)
    nowhere = f"ipc://{tmp_path}/none.sock"
    done = run_cli("demo", "--config", str(config), MLXSUP_ENDPOINT=nowhere)
    assert done.returncode == 0, done.stderr
    check_plain(done.stdout + done.stderr)
    assert done.stdout.count("killed pid ") == 3
    assert "only: 40 tokens, the same text as before, resumed 3 times\n" in done.stdout
    assert "only-copy: 40 tokens, the same text as before\n" in done.stdout
    assert done.stdout.endswith("mlxsup stop\nall processes have ended\n")


def test_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    config = write_config(tmp_path, "a", "b")
    with Piped("demo", "--config", str(config)) as piped:
        while " alone: " not in (line := piped.line()):
            assert line, piped.end()
        demo = psutil.Process(piped.process.pid)
        places = [Path(str(one.laddr)) for one in demo.net_connections("unix")]
        [folder] = {place.parents[1] for place in places if place.name == "client.sock"}
        assert folder.name.startswith("mlxsup-demo-")
        processes = demo.children(recursive=True)
        demo.send_signal(signal.SIGINT)
        code, _, err = piped.end()
    assert code == 130
    *told, said = err.splitlines()
    assert all(map(TOLD.match, told)), err
    assert said == "Stopped. All processes of the demo have ended."
    eventually(lambda: not any(map(is_alive, processes)))
    assert not folder.exists()


def test_model_that_does_not_load_says_why_and_what_helps(tmp_path: Path) -> None:
    config = tmp_path / "mlxsup.toml"
    config.write_text(toml_of({"models.a": {"path": str(tmp_path / "none")}}))
    done = run_cli("demo", "--config", str(config))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: a could not be loaded")
    assert str(tmp_path / "none") in error
    assert hint == f"hint: `mlxsup start --config {config}` shows more"
