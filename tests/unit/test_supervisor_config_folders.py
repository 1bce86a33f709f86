"""Where the models of a configuration are, and why a folder cannot be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import (
    ConfigError,
    DaemonConfig,
    config_of_folders,
    load_config,
    split_model,
)
from mlxsup.supervisor.config.model_folders import check_model_folders, model_problems, sentence

from support.daemon.estimates_here import estimates_here
from support.daemon.hub_caches import MODEL, REPO, write_folder, write_repository

__all__ = ["estimates_here"]

NO_JSON = {**MODEL, "config.json": b"{"}
NO_WEIGHTS = {name: content for name, content in MODEL.items() if name != "model.safetensors"}


OWN = Path("mlxsup.toml")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimates_here: None) -> Path:
    """An empty cache of a machine that may ask the hub, and an empty working folder next to it."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    cache, here = tmp_path / "hub", tmp_path / "here"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    here.mkdir()
    monkeypatch.chdir(here)
    return cache


def read(text: str) -> DaemonConfig:
    """What the configuration in the working folder says, once it is this text."""
    OWN.write_text(text)
    return load_config(OWN)


def test_a_file_is_known_by_its_absolute_path_and_links_stay_links(cache: Path) -> None:
    """A daemon in the background works elsewhere; a reload follows the link anew."""
    Path("file.toml").touch()
    OWN.symlink_to("file.toml")
    assert load_config(OWN).config_path == Path.cwd() / OWN


def test_a_reload_sees_where_a_revision_went(cache: Path) -> None:
    text = f'[models.m]\nrepo = "{REPO}"\nrevision = "v2"\n'
    [model] = read(text).models
    assert model.launch.path == f"{cache}/models--{REPO.replace('/', '--')}"
    assert not Path(model.launch.path).exists()
    assert model.download is not None
    write_repository(cache, commit="a" * 40)
    for commit in ("b" * 40, "c" * 40):
        snapshot = write_repository(cache, commit=commit, revision="v2")
        [model] = read(text).models
        assert (model.launch.path, model.revision) == (str(snapshot), "v2")
        assert model.download is None, "it is complete"
    (snapshot / "model.safetensors").unlink()
    assert read(text).models[0].download is not None


def test_source_of_an_entry_is_never_mixed_with_that_of_the_defaults(
    cache: Path,
) -> None:
    snapshot = write_repository(cache)
    config = read(
        '[defaults]\nrepo = "a/b"\nrevision = "v1"\n'
        '[models.folder]\npath = "m"\n'
        f'[models.snapshot]\nrepo = "{REPO}"\n'
        '[models.same]\nrevision = "v2"\n'
    )
    folder, found, same = config.models
    assert (folder.repo, folder.revision, Path(folder.launch.path).name) == ("", "", "m")
    assert (found.revision, found.launch.path) == ("main", str(snapshot))
    assert (same.repo, same.revision) == ("a/b", "v2")


def test_owner_and_name_on_the_command_line_are_a_repository(cache: Path) -> None:
    assert split_model(REPO) == (REPO.split("/")[1], REPO)
    assert split_model(f"small={REPO}") == ("small", REPO)
    config = config_of_folders({"small": REPO})
    assert config.text == f'[models.small]\nrepo = "{REPO}"\n'
    assert read(config.text).models == config.models


@pytest.mark.parametrize(
    ("given", "name", "folder"),
    [
        ("models/smollm2/", "smollm2", "models/smollm2"),
        ("small=./models/smollm2", "small", "models/smollm2"),
        ("./a=b", "a=b", "a=b"),
        (".", "here", "."),
        ("~/m", "m", "/home/me/m"),
        ("n=~/m", "n", "/home/me/m"),
        ("~no-such-user/m", "m", "~no-such-user/m"),
        ("=m", "=m", "=m"),
    ],
)
def test_a_folder_gives_its_name_unless_one_is_given(
    cache: Path, monkeypatch: pytest.MonkeyPatch, given: str, name: str, folder: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert split_model(given) == (name, Path.cwd() / folder)


def test_folders_are_written_so_that_each_name_and_path_can_be_read_again(cache: Path) -> None:
    odd = Path('/q"\\\t\x7fé📦')
    config = config_of_folders({"a": Path("/m"), "b.c": odd})
    escaped = json.dumps(str(odd)).replace("\\ud83d\\udce6", "\\U0001F4E6")
    assert escaped == '"/q\\"\\\\\\t\\u007f\\u00e9\\U0001F4E6"'
    assert config.text == f'[models.a]\npath = "/m"\n\n[models."b.c"]\npath = {escaped}\n'
    assert [model.launch.path for model in config.models] == ["/m", str(odd)]
    assert read(config.text).models == config.models
    with pytest.raises(ConfigError, match=r'--model:1: models\."a=b" is not a valid model name'):
        config_of_folders({"a=b": Path("/m")})


def test_a_folder_is_never_taken_for_a_repository(cache: Path) -> None:
    """Not if it exists; nor if it does not, but the folder around it does."""
    write_folder(Path("owner/name"))
    here = Path.cwd() / "owner"
    assert split_model("owner/name") == ("name", here / "name")
    assert split_model("owner/nam") == ("nam", here / "nam")
    assert split_model("./other/name") == ("name", Path.cwd() / "other" / "name")
    # What is in the cache under exactly this name is meant, unless it is a folder as well.
    write_repository(cache, "owner/nam")
    assert split_model("owner/nam") == ("nam", "owner/nam")
    write_repository(cache, "owner/name")
    assert split_model("owner/name") == ("name", here / "name")


def problems_of(text: str) -> dict[str, str]:
    """What is said of each model."""
    problems = model_problems(read(text))
    return {name: sentence(problem) for name, problem in problems.items()}


def test_models_that_can_be_loaded_or_downloaded_are_no_problem(cache: Path) -> None:
    write_folder(Path("model"))
    write_repository(cache)
    write_repository(cache, "a/half", files=NO_WEIGHTS)
    text = (
        f'[models.a]\npath = "model"\n[models.b]\nrepo = "{REPO}"\n[models.c]\nengine = "fake"\n'
        '[models.d]\nrepo = "some/other"\n[models.e]\nrepo = "a/half"\n'
    )
    assert problems_of(text) == {}
    check_model_folders(read(text), OWN)


def test_models_with_a_problem_are_named_with_what_to_do(cache: Path) -> None:
    write_folder(Path("good"))
    damaged = write_folder(Path("damaged"), NO_JSON).absolute()
    empty = write_folder(Path("empty"), NO_WEIGHTS).absolute()
    snapshot = write_repository(cache, files={**MODEL, "model.safetensors": b"none"})
    problems = problems_of(
        '[models.a]\npath = "good"\n[models.b]\npath = "nowhere"\n[models.c]\npath = "empty"\n'
        f'[models.d]\npath = "damaged"\n[models.e]\nrepo = "{REPO}"\n'
    )
    assert list(problems) == ["b", "c", "d", "e"]
    absent = f"the model folder {Path.cwd()}/nowhere does not exist"
    assert problems["b"] == f"{absent}; `mlxsup models` lists the models on this machine"
    assert str(empty) in problems["c"]
    assert problems["d"].startswith(f"{damaged}/config.json is not JSON: ")
    assert ";" not in problems["d"], "there is no advice"
    says = f"{snapshot}/model.safetensors is not a safetensors file"
    assert problems["e"] == f"{says}; copy or download this file again"


@pytest.mark.parametrize("name", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_a_start_offline_is_refused_with_the_line_and_the_key_of_each(
    cache: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    half = write_repository(cache, "a/half", files=NO_WEIGHTS)
    write_folder(Path("damaged"), {**MODEL, "model.safetensors": b"none"})
    text = (
        f'[models.a]\nrepo = "{REPO}"\nrevision = "v2"\n\n'
        '[models.b]\nmax_concurrency = 2\npath = "damaged"\n[models.c]\nrepo = "a/half"\n'
    )
    config = read(text)
    with pytest.raises(ConfigError) as caught:
        check_model_folders(config, OWN)
    *others, last = caught.value.problems
    assert others == [
        f"mlxsup.toml:2: models.a.repo: {REPO} at v2 is not in the Hugging Face cache {cache}; "
        f"download it with `mlxsup pull {REPO} --revision v2`",
        f"mlxsup.toml:7: models.b.path: {Path.cwd()}/damaged/model.safetensors "
        "is not a safetensors file; copy or download this file again",
    ]
    assert last.startswith(f"mlxsup.toml:9: models.c.repo: {half}/model.safetensors does not exist")
