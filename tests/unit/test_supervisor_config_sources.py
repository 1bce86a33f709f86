"""Where the model of an entry is: a folder, or a snapshot of the Hugging Face cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.folders import config_of_folders, split_model
from mlxsup.supervisor.config.load import ConfigError

from support.config_here import empty_cache, read
from support.hub_caches import REPO, write_folder, write_repository


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return empty_cache(tmp_path, monkeypatch)


def test_a_repo_is_served_from_its_snapshot_where_it_is(cache: Path) -> None:
    snapshot = write_repository(cache)
    [model] = read(f'[models.m]\nrepo = "{REPO}"\n').models
    assert model.launch.path == str(snapshot)
    assert (model.repo, model.revision) == (REPO, "main")


def test_a_revision_chooses_the_snapshot_and_a_reload_sees_where_it_went(cache: Path) -> None:
    write_repository(cache, commit="a" * 40)
    other = write_repository(cache, commit="b" * 40, revision="v2")
    text = f'[models.m]\nrepo = "{REPO}"\nrevision = "v2"\n'
    before = read(text).models
    assert before[0].launch.path == str(other)
    moved = write_repository(cache, commit="c" * 40, revision="v2")
    after = read(text).models
    assert after[0].launch.path == str(moved)
    assert after != before


def test_a_repo_that_is_not_there_names_its_place_in_the_cache(cache: Path) -> None:
    [model] = read(f'[models.m]\nrepo = "{REPO}"\n').models
    assert model.launch.path == f"{cache}/models--{REPO.replace('/', '--')}"
    assert not Path(model.launch.path).exists()


def test_an_entry_that_says_where_its_model_is_takes_no_part_of_that_from_the_defaults(
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
    config, text = config_of_folders({"small": REPO})
    assert text == f'[models.small]\nrepo = "{REPO}"\n'
    assert read(text).models == config.models


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


REPOSITORY = 'a repository such as "mlx-community/SmolLM2-135M-Instruct"'


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("repo = 3", f"2: models.m.repo takes {REPOSITORY}, not 3"),
        ('repo = "../m"', f'2: models.m.repo takes {REPOSITORY}, not "../m"'),
        ('repo = "a/b/c"', f'2: models.m.repo takes {REPOSITORY}, not "a/b/c"'),
        (
            'repo = "a/b"\nrevision = "../main"',
            '3: models.m.revision takes a branch, tag or commit, not "../main"',
        ),
        ('path = "m"\nrevision = "v1"', "3: models.m.revision needs repo"),
        ('path = "m"\nrepo = "a/b"', "3: models.m takes either path or repo, not both"),
    ],
)
def test_a_source_that_makes_no_sense_is_one_error_with_its_line(
    cache: Path, lines: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"[models.m]\n{lines}\n")
    assert caught.value.problems == [f"mlxsup.toml:{words}"]
