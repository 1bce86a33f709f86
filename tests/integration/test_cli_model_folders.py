"""Model folders are looked at before anything listens: `start`, `start --model`, `config check`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.cli import Piped, run_cli
from support.hub_caches import REPO, write_folder, write_repository


@pytest.fixture
def home() -> Iterator[Path]:
    """An empty home with a short path, because sockets go into it."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        yield Path(name)


def variables(home: Path) -> dict[str, str]:
    cache = {"HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}
    return {"HOME": str(home), **cache, "HF_HUB_OFFLINE": "1"}


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_offline_a_repository_that_is_not_in_the_cache_is_refused_before_anything_listens(
    home: Path, more: list[str]
) -> None:
    done = run_cli("start", "--model", REPO, *more, **variables(home))
    assert done.returncode == 64
    assert "listening" not in done.stdout
    assert done.stderr.splitlines() == [
        f"error: {REPO} is not in the Hugging Face cache {home}/hub",
        f"hint: download it with `mlxsup pull {REPO}`",
    ]
    assert not (home / ".mlxsup" / "run").exists()


def test_a_folder_that_holds_models_is_refused_with_the_one_to_name(home: Path) -> None:
    write_folder(home / "all" / "one")
    done = run_cli("start", "--model", f"{home}/all", "--json", **variables(home))
    assert done.returncode == 64
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert error["code"] == "model_folder"
    assert error["hint"] == f"name one of them: {home}/all/one"


def test_a_repository_of_the_cache_is_served_from_there(home: Path) -> None:
    snapshot = write_repository(home / "hub")
    with Piped("start", "--model", f"m={REPO}", **variables(home)) as started:
        text = ""
        while not (line := started.line()).startswith("listening at "):
            text += line
        assert f'[models.m]\nrepo = "{REPO}"' in text
        while not (change := started.line()).rpartition("m: ")[2].startswith("LOADING → "):
            assert "m: " in change
        # What it was made of is no real model; the sentence names the file that was read.
        assert str(snapshot) in change
        assert started.interrupt()[0] == 0


def test_config_check_knows_that_a_missing_repository_will_be_downloaded(home: Path) -> None:
    config = home / "c.toml"
    config.write_text(f'[models.missing]\nrepo = "{REPO}"\n')
    done = run_cli("config", "check", str(config), **{**variables(home), "HF_HUB_OFFLINE": "0"})
    assert (done.returncode, done.stderr) == (0, "")


def test_config_check_lists_each_folder_with_its_line(home: Path) -> None:
    write_repository(home / "hub", "a/hub")
    write_folder(home / "sound")
    config = home / "c.toml"
    config.write_text(
        '[models.gone]\npath = "gone"\n'
        f'[models.hub]\npath = "{home}/hub/models--a--hub"\n'
        f'[models.missing]\npreload = false\nrepo = "{REPO}"\n'
        '[models.sound]\npath = "sound"\n'
        '[models.fake]\nengine = "fake"\n'
        '[models.snapshot]\nrepo = "a/hub"\n'
    )
    done = run_cli("config", "check", str(config), **variables(home))
    assert (done.returncode, done.stdout) == (78, f"checking {config}\n")
    first, *problems, hint = done.stderr.splitlines()
    assert first == f"error: {config} is not a valid configuration:"
    assert hint == f"hint: fix it, then `mlxsup config check {config}`"
    starts = [
        f"  {config}:2: models.gone.path: the model folder {home}/gone does not exist; ",
        f"  {config}:4: models.hub.path: {home}/hub/models--a--hub is the cache's folder of a/hub",
        f"  {config}:7: models.missing.repo: {REPO} is not in the Hugging Face cache {home}/hub; ",
    ]
    assert len(problems) == len(starts)
    for problem, start in zip(problems, starts, strict=True):
        assert problem.startswith(start)


def test_start_with_a_file_warns_of_a_folder_and_serves_the_others(home: Path) -> None:
    config = home / "c.toml"
    config.write_text(
        f'[supervisor]\nruntime_dir = "{home}/run"\nlog_dir = "logs"\n'
        '[models.gone]\npath = "gone"\npreload = false\n'
        '[models.fake]\nengine = "fake"\n'
    )
    with Piped("start", "--config", str(config), **variables(home)) as started:
        while "fake: LOADING → READY" not in started.line():
            pass
        code, _, err = started.interrupt()
    assert code == 0
    assert err.startswith(f"warning: gone: the model folder {home}/gone does not exist; ")
    assert err.splitlines()[1:] == ["stopping: ending every process"]
