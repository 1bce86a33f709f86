"""Snapshots of the Hugging Face cache, with huggingface_hub as the oracle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxsup.store.description import missing_files
from mlxsup.store.hub_cache import (
    check_repository,
    check_revision,
    find_cache,
    find_snapshot,
    is_owned_repository,
    repositories,
    repository_folder,
)

from support.daemon.hub_caches import COMMIT, MODEL, REPO, index_of, write_folder, write_repository

OTHER_COMMIT = "f" * 40

NAMES = st.text("aZ0_-./", min_size=1, max_size=12)


def is_valid_for_hub(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


@settings(max_examples=40)
@given(NAMES)
@example("a" * 96)
@example("a" * 97)
@example("owner/" + "a" * 97)
@example("../../etc/passwd")
@example("owner/..")
@example("owner/name.git")
@example("owner/na--me")
@example("modèle/nom")
@example("owner/name\n")
def test_repository_names_are_those_of_the_hub_library(name: str) -> None:
    try:
        assert check_repository(name) == name
    except ValueError:
        assert not is_valid_for_hub(name)
    else:
        assert is_valid_for_hub(name)


@settings(max_examples=40)
@given(NAMES)
def test_repository_folder_stays_in_the_cache(name: str) -> None:
    cache = Path("/cache")
    try:
        folder = repository_folder(name, cache)
    except ValueError:
        return
    assert folder.parent == cache
    assert ".." not in folder.parts


@pytest.mark.parametrize(
    "revision", ["", "../main", "refs/../../x", "/etc", "a//b", ".hidden", "a b", "x" * 300, "a\n"]
)
def test_revision_that_could_leave_the_folder_is_refused(revision: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="branch, tag or commit"):
        check_revision(revision)
    with pytest.raises(ValueError, match="branch, tag or commit"):
        find_snapshot(REPO, revision, cache=tmp_path)


def test_paths_are_no_repositories() -> None:
    assert is_owned_repository(REPO)
    for text in ("./models/x", "../x", "~/x", "/models/x", "x", "a/b/c", "a/b/", "models/"):
        assert not is_owned_repository(text)


@pytest.mark.parametrize(
    ("asked", "kept", "commit"),
    [
        ("main", "main", COMMIT),
        ("refs/pr/7", "refs/pr/7", COMMIT),
        ("v1.0", "v1.0", COMMIT),
        (COMMIT, None, COMMIT),
        ("main", None, None),
        ("other", "main", None),
        (OTHER_COMMIT, "main", None),
    ],
)
def test_revisions_mean_what_the_hub_library_says(
    asked: str, kept: str | None, commit: str | None, tmp_path: Path
) -> None:
    write_repository(tmp_path, revision=kept)
    found = find_snapshot(REPO, asked, cache=tmp_path)
    oracle = try_to_load_from_cache(REPO, "config.json", cache_dir=tmp_path, revision=asked)
    if commit is None:
        assert found is None
        assert oracle is None
    else:
        assert found is not None
        assert (found.commit, found.missing) == (commit, ())
        assert isinstance(oracle, str)
        assert found.path == Path(oracle).parent


def test_snapshot_of_the_revision_is_found(tmp_path: Path) -> None:
    write_repository(tmp_path, commit=OTHER_COMMIT, revision=None)
    path = write_repository(tmp_path)
    found = find_snapshot(REPO, cache=tmp_path)
    assert found is not None
    assert found.path == path


def test_reference_out_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    write_repository(tmp_path)
    outside = write_folder(tmp_path / "outside")
    reference = tmp_path / "models--mlx-community--SmolLM2-135M-Instruct-4bit" / "refs" / "main"
    reference.write_text("../../outside")
    assert outside.is_dir()
    assert find_snapshot(REPO, cache=tmp_path) is None


def test_missing_shards_are_named(tmp_path: Path) -> None:
    files = {name: MODEL[name] for name in ("config.json", "tokenizer.json")}
    files["model.safetensors.index.json"] = index_of("model-1.safetensors", "model-2.safetensors")
    files["model-1.safetensors"] = MODEL["model.safetensors"]
    write_repository(tmp_path, files=files)
    found = find_snapshot(REPO, cache=tmp_path)
    assert found is not None
    assert found.missing == ("model-2.safetensors",)
    assert not found.is_complete


def test_broken_link_counts_as_missing(tmp_path: Path) -> None:
    snapshot = write_repository(tmp_path)
    (snapshot / "model.safetensors").resolve().unlink()
    found = find_snapshot(REPO, cache=tmp_path)
    assert found is not None
    assert found.missing == ("model.safetensors",)


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        ("config.json", ("config.json",)),
        ("tokenizer.json", ("tokenizer.json",)),
        ("model.safetensors", ("model.safetensors",)),
        ("tokenizer_config.json", ()),
    ],
)
def test_missing_files_are_named(gone: str, missing: tuple[str, ...], tmp_path: Path) -> None:
    write_folder(tmp_path, {name: text for name, text in MODEL.items() if name != gone})
    assert missing_files(tmp_path) == missing


def test_cache_lists_its_models(tmp_path: Path) -> None:
    assert list(repositories(tmp_path / "none")) == []
    write_repository(tmp_path)
    write_repository(tmp_path, "gpt2")
    for name in ("datasets--a--b", ".locks", "models--", "models--a--..", "version.txt"):
        (tmp_path / name).mkdir()
    (tmp_path / "models--a--file").touch()
    assert list(repositories(tmp_path)) == ["gpt2", REPO]


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "/hf", "XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "~/hf"},
    {"HF_HOME": "$WHERE/hf", "WHERE": "/here"},
    {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
    {"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old"},
]


@pytest.mark.parametrize("variables", ENVIRONMENTS, ids=str)
def test_cache_is_where_the_hub_library_has_it(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "WHERE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"
    command = [sys.executable, "-c", code]
    oracle = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert str(find_cache()) == oracle.stdout.strip()
