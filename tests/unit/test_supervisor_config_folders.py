"""The folders of a configuration's models: those that cannot be loaded are named with why."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import ConfigError
from mlxsup.supervisor.config.model_folders import check_model_folders, model_problems, sentence

from support.config_here import empty_cache, read
from support.hub_caches import MODEL, REPO, write_folder, write_repository

NO_JSON = {**MODEL, "config.json": b"{"}
NO_WEIGHTS = {name: content for name, content in MODEL.items() if name != "model.safetensors"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a machine that may ask the hub, and an empty working folder next to it."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return empty_cache(tmp_path, monkeypatch)


def problems_of(text: str) -> dict[str, str]:
    """What is said of each model."""
    problems = model_problems(read(text))
    return {name: sentence(problem) for name, problem in problems.items()}


def refused(text: str) -> list[str]:
    config = read(text)
    with pytest.raises(ConfigError) as caught:
        check_model_folders(config, Path("mlxsup.toml"))
    return caught.value.problems


def test_folders_and_snapshots_that_can_be_loaded_are_no_problem(cache: Path) -> None:
    write_folder(Path("model"))
    write_repository(cache)
    text = f'[models.a]\npath = "model"\n[models.b]\nrepo = "{REPO}"\n'
    assert problems_of(text) == {}
    check_model_folders(read(text), Path("mlxsup.toml"))


def test_the_fake_engine_has_no_folder(cache: Path) -> None:
    assert problems_of('[models.a]\nengine = "fake"\n') == {}


def test_only_the_models_with_a_problem_are_named_each_with_what_to_do(cache: Path) -> None:
    write_folder(Path("good"))
    empty = write_folder(Path("empty"), NO_WEIGHTS).absolute()
    text = (
        '[models.a]\npath = "good"\n[models.b]\npath = "nowhere"\n[models.c]\npath = "empty"\n'
        '[models.d]\nengine = "fake"\n'
    )
    absent = f"the model folder {Path.cwd()}/nowhere does not exist"
    problems = problems_of(text)
    assert list(problems) == ["b", "c"]
    assert problems["b"] == f"{absent}; see which models there are with `mlxsup models`"
    assert str(empty) in problems["c"]


def test_a_folder_whose_files_are_all_there_and_damaged_is_one_too(cache: Path) -> None:
    folder = write_folder(Path("model"), NO_JSON).absolute()
    problem = problems_of('[models.a]\npath = "model"\n')["a"]
    assert problem.startswith(f"{folder}/config.json is not JSON: ")
    assert ";" not in problem, "there is no advice"


def test_a_repository_that_will_be_downloaded_is_no_problem(cache: Path) -> None:
    assert problems_of(f'[models.a]\nrepo = "{REPO}"\n') == {}


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_one_that_is_not_there_is_a_problem_where_nothing_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    text = f'[models.a]\nrepo = "{REPO}"\nrevision = "v2"\n'
    assert problems_of(text) == {
        "a": f"{REPO} at v2 is not in the Hugging Face cache {cache}; "
        f"download it with `mlxsup pull {REPO} --revision v2`"
    }


def test_half_a_repository_is_judged_by_its_folder_where_nothing_is_downloaded(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = write_repository(cache, files=NO_WEIGHTS)
    text = f'[models.a]\nrepo = "{REPO}"\n'
    assert problems_of(text) == {}, "the rest of it is downloaded"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert str(half) in problems_of(text)["a"]


def test_a_damaged_snapshot_is_a_problem_though_one_may_download(cache: Path) -> None:
    files = {**MODEL, "model.safetensors": b"none"}
    snapshot = write_repository(cache, files=files)
    assert problems_of(f'[models.a]\nrepo = "{REPO}"\n') == {
        "a": f"{snapshot}/model.safetensors is not a safetensors file"
    }


def test_a_start_is_refused_with_the_line_and_the_key_of_each(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    write_folder(Path("damaged"), {**MODEL, "model.safetensors": b"none"})
    text = f'[models.a]\nrepo = "{REPO}"\n\n[models.b]\nmax_concurrency = 2\npath = "damaged"\n'
    assert refused(text) == [
        f"mlxsup.toml:2: models.a.repo: {REPO} is not in the Hugging Face cache {cache}; "
        f"download it with `mlxsup pull {REPO}`",
        f"mlxsup.toml:6: models.b.path: {Path.cwd()}/damaged/model.safetensors "
        "is not a safetensors file",
    ]


def test_the_file_may_be_in_the_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(Path.cwd()))
    config = read('[models.a]\npath = "nowhere"\n')
    with pytest.raises(ConfigError, match=r"^~/mlxsup\.toml:2: models\.a\.path: the model folder"):
        check_model_folders(config, Path("~/mlxsup.toml"))
