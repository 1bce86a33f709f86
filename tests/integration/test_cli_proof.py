"""`mlxsup doctor --prove`: its figures pass on a sound daemon, and fail on one that is not."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.cli import ESCAPE, Piped, command, environment, on_terminal, run_cli
from support.daemon import Daemon, fake, is_alive, toml_of
from support.demo_model import demo_model_folder
from support.eventually import eventually
from support.json_schemas import problems
from support.lossy import SABOTAGE

STEP_S = 0.01
NAMES = ["seeded_answer", "two_kills", "other_model", "unload"]


UNLOADS_NOTHING = """
import sys
from mlxsup.cli.main import main
from mlxsup.client import Client
Client.unload = lambda self, model: {}
main(sys.argv[1:])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one, because of the sockets."""
    path = Path(tempfile.mkdtemp(prefix="mlxsup-p-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def write_config(folder: Path, *names: str, **entry: Any) -> Path:
    """A configuration with fake engines; its runtime folder is not to be used."""
    path = folder / "mlxsup.toml"
    top = {"runtime_dir": "/nowhere/run", "log_dir": str(folder / "logs")}
    options = {"step_s": STEP_S, "prefill_tokens_per_step": 64}
    model = fake(fake=options, aliases=[], **entry)
    path.write_text(toml_of({"supervisor": top} | {f"models.{name}": model for name in names}))
    return path


def sabotaged(folder: Path, what: str) -> dict[str, str]:
    """The variables for workers that do this."""
    paths = f"{SABOTAGE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"MLXSUP_SABOTAGE": f"{what}:{folder / 'struck'}", "PYTHONPATH": paths}


def test_all_figures_pass_and_are_saved(folder: Path) -> None:
    config = write_config(folder, "m", pinned=True)
    config.write_text(config.read_text().replace("aliases = []", 'aliases = ["best"]'))
    done = run_cli("doctor", "--prove", "--config", str(config), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert problems(done.stdout, ["doctor"]) == []
    proof = json.loads(done.stdout)["proof"]
    assert proof["has_passed"] is True
    figures = {one["name"]: one for one in proof["figures"]}
    assert list(figures) == NAMES
    assert {one["verdict"] for one in figures.values()} == {"passed"}, figures
    kills = figures["two_kills"]["values"]
    assert (len(kills["kills"]), kills["resumed"], kills["is_same"]) == (2, 2, True)
    assert 0 < kills["kills"][0]["tokens"] < kills["kills"][1]["tokens"] < kills["tokens"]
    assert figures["other_model"]["values"]["pieces"] > 0
    assert figures["unload"]["values"]["alive"] == []
    assert figures["unload"]["values"]["held_bytes"] > 0
    path = Path(proof.pop("path"))
    assert path.parent == folder / "logs"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text()) == proof


def test_its_story_is_plain_in_a_pipe_and_a_running_daemon_is_left_alone(folder: Path) -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        saved = folder / "figures.json"
        config = write_config(folder, "m", "other")
        arguments = ["doctor", "--prove", "m", "--config", str(config), "--output", str(saved)]
        done = run_cli(*arguments, MLXSUP_ENDPOINT=daemon.endpoint)
        assert done.returncode == 0, done.stdout + done.stderr
        [mine] = client.status()["models"]
        assert (mine["state"], mine["generation"]) == ("READY", 1)
    assert "\x1b" not in done.stdout + done.stderr
    first, *figures, last = done.stdout.splitlines()
    assert first == "m (fake engine), in its own daemon"
    assert [line.split()[0] for line in figures] == ["passed"] * 4
    assert last == "passed: 4 of 4"
    assert f"the figures are saved in {saved}\n" in done.stderr
    assert json.loads(saved.read_text())["model"] == "m"


@pytest.mark.parametrize(
    ("what", "name", "words"),
    [
        ("resumes wrongly", "two_kills", "the texts differ from character"),
        ("takes turns", "other_model", "its longest gap was"),
    ],
)
def test_a_planted_defect_fails_its_figure(folder: Path, what: str, name: str, words: str) -> None:
    config = write_config(folder, "m")
    done = subprocess.run(
        command("doctor", "--prove", "--config", str(config)),
        capture_output=True,
        text=True,
        env=environment(**sabotaged(folder, what)),
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    title = {"two_kills": "two kills", "other_model": "other model"}[name]
    [failed] = [line for line in done.stdout.splitlines() if line.startswith("FAILED  ")]
    assert title in failed
    assert words in failed
    assert done.stdout.splitlines()[-1] == f"FAILED: {title}; please report it with the file"
    [saved] = (folder / "logs").glob("proof-*.json")
    value = json.loads(saved.read_text())
    assert value["has_passed"] is False
    verdicts = {one["name"]: one["verdict"] for one in value["figures"]}
    assert [one for one in NAMES if verdicts[one] == "FAILED"] == [name]


def test_processes_that_an_unload_leaves_fail_their_figure(folder: Path) -> None:
    config = write_config(folder, "m")
    done = subprocess.run(
        [sys.executable, "-c", UNLOADS_NOTHING, "doctor", "--prove", "--config", str(config),
         "--json"],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    proof = json.loads(done.stdout)["proof"]
    [*others, figure] = proof["figures"]
    assert {one["verdict"] for one in others} == {"passed"}
    assert (figure["verdict"], len(figure["values"]["alive"])) == ("FAILED", 2)
    assert figure["text"].startswith("processes are left: ")


def test_a_model_that_fits_only_once_is_proved_without_a_copy(folder: Path) -> None:
    config = write_config(folder, "m", memory="600MiB")
    text = config.read_text().replace("[supervisor]", '[supervisor]\nmemory_budget = "1GiB"')
    config.write_text(text)
    done = run_cli("doctor", "--prove", "--config", str(config), "--json")
    assert done.returncode == 0, done.stdout
    proof = json.loads(done.stdout)["proof"]
    verdicts = {one["name"]: one["verdict"] for one in proof["figures"]}
    assert verdicts == dict.fromkeys(NAMES, "passed") | {"other_model": "not shown"}


@pytest.mark.parametrize("width", [40, 80, 200])
def test_on_a_terminal_its_lines_fit(folder: Path, width: int) -> None:
    config = write_config(folder, "m")
    arguments = ["doctor", "--prove", "--config", str(config)]
    shown = on_terminal(arguments, COLUMNS=str(width))
    assert "\x1b[32mpassed" in shown
    lines = ESCAPE.sub("", shown).splitlines()
    figures = [line for line in lines if line.startswith(("passed", " " * 11))]
    assert len(figures) >= 5
    assert max(map(len, figures)) <= width


def test_ctrl_c_leaves_nothing(folder: Path) -> None:
    config = write_config(folder, "m")
    with Piped("doctor", "--prove", "--config", str(config)) as piped:
        assert piped.line()
        assert piped.line().startswith("passed     same seed")
        processes = psutil.Process(piped.process.pid).children(recursive=True)
        assert processes
        code, out, err = piped.interrupt()
    assert code == 130
    assert "Traceback" not in out + err
    eventually(lambda: not any(map(is_alive, processes)))
    assert not [*(folder / "logs").glob("proof-*")]


def test_wrong_names_and_places_get_a_sentence(folder: Path) -> None:
    config = write_config(folder, "a", "b")
    there = ["--config", str(config)]
    cases = (
        ([*there], 64, "name a model; configured: a, b"),
        (["c", *there], 1, "no model is called 'c'; configured: a, b"),
        (["./c", *there], 64, "c does not exist"),
        (["a", "--output", str(config), *there], 64, "exists already"),
        (["a", "--output", "/nowhere/figures.json", *there], 64, "its folder does not exist"),
    )
    for arguments, code, words in cases:
        done = run_cli("doctor", "--prove", *arguments)
        assert (done.returncode, done.stdout) == (code, ""), arguments
        assert words in done.stderr
        assert re.search(r"^hint: ", done.stderr, re.M)


def test_a_model_that_does_not_load_says_why(folder: Path) -> None:
    config = write_config(folder, "m")
    text = config.read_text().replace("step_s", 'load_error = "bad", step_s')
    config.write_text(text)
    done = run_cli("doctor", "--prove", "--config", str(config))
    assert done.returncode == 1
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: m could not be loaded")
    assert hint.startswith("hint: `mlxsup doctor")


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(1200)
def test_the_demo_model_passes(folder: Path) -> None:
    saved = folder / "figures.json"
    done = subprocess.run(
        command("doctor", "--prove", str(demo_model_folder()), "--output", str(saved), "--json"),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    proof = json.loads(done.stdout)["proof"]
    assert [one["verdict"] for one in proof["figures"]] == ["passed"] * 4
