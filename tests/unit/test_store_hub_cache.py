"""Snapshots of the Hugging Face cache, with huggingface_hub as the oracle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from hypothesis import example, given
from hypothesis import strategies as st

from mlxsup.store.hub_cache import (
    OFFLINE_VARIABLES,
    InUseError,
    check_repository,
    check_revision,
    find_cache,
    find_snapshot,
    is_offline,
    is_owned_repository,
    repositories,
    repository_folder,
    sole_user,
)
from mlxsup.store.model_folder import missing_files

from support.daemon.hub_caches import COMMIT, MODEL, REPO, index_of, write_folder, write_repository

OTHER_COMMIT = "f" * 40

NAMES = st.text("aZ0_-./", min_size=1, max_size=12)


def is_valid_for_hub(name: str) -> bool:
    try:
        hf_hub_url(name, "config.json")
    except HFValidationError:
        return False
    return True


@given(NAMES)
@example("a" * 96)
@example("a" * 97)
@example("owner/" + "a" * 97)
@example("../../etc/passwd")
@example("owner/..")
@example("owner/na..me")
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


def test_only_owner_and_name_are_a_repository() -> None:
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
    write_repository(tmp_path, commit="e" * 40, revision=None)
    write_repository(tmp_path, revision=kept)
    found = find_snapshot(REPO, asked, cache=tmp_path)
    oracle = try_to_load_from_cache(REPO, "config.json", cache_dir=tmp_path, revision=asked)
    if commit is None:
        assert found is None
        assert oracle is None
    else:
        assert found is not None
        assert found.name == commit
        assert missing_files(found) == ()
        assert isinstance(oracle, str)
        assert found == Path(oracle).parent


def test_start_of_a_revision_is_no_revision(tmp_path: Path) -> None:
    write_repository(tmp_path, revision="refs/pr/7")
    assert find_snapshot(REPO, "refs/pr", cache=tmp_path) is None


def test_reference_out_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    write_repository(tmp_path)
    outside = write_folder(tmp_path / "outside")
    reference = tmp_path / "models--mlx-community--SmolLM2-135M-Instruct-4bit" / "refs" / "main"
    reference.write_text("../../outside")
    assert outside.is_dir()
    assert find_snapshot(REPO, cache=tmp_path) is None


SHARDS = {"model-1.safetensors": b"", "model.safetensors.index.json": index_of(
    "model-1.safetensors", "model-2.safetensors"
)}  # fmt: skip


@pytest.mark.parametrize(
    ("gone", "more", "missing"),
    [
        ("config.json", {}, ("config.json",)),
        ("tokenizer.json", {}, ("tokenizer.json",)),
        ("model.safetensors", {}, ("model.safetensors",)),
        ("model.safetensors", SHARDS, ("model-2.safetensors",)),
        ("tokenizer_config.json", {}, ()),
    ],
)
def test_files_that_a_load_needs_and_does_not_find_are_named(
    gone: str, more: dict[str, bytes], missing: tuple[str, ...], tmp_path: Path
) -> None:
    files = {name: text for name, text in MODEL.items() if name != gone}
    write_folder(tmp_path, {**files, **more})
    assert missing_files(tmp_path) == missing


def test_snapshot_with_a_broken_link_is_not_complete(tmp_path: Path) -> None:
    snapshot = write_repository(tmp_path)
    (snapshot / "model.safetensors").resolve().unlink()
    found = find_snapshot(REPO, cache=tmp_path)
    assert found is not None
    assert missing_files(found) == ("model.safetensors",)


def test_cache_lists_its_models(tmp_path: Path) -> None:
    assert list(repositories(tmp_path / "none")) == []
    write_repository(tmp_path)
    write_repository(tmp_path, "gpt2")
    for name in ("datasets--a--b", ".locks", "models--", "models--a--..", "version.txt"):
        (tmp_path / name).mkdir()
    (tmp_path / "models--a--file").touch()
    assert list(repositories(tmp_path)) == ["gpt2", REPO]


def test_each_repository_and_each_file_of_it_has_a_lock_of_its_own(tmp_path: Path) -> None:
    one, other = tmp_path / "models--o--one", tmp_path / "models--o--other"
    with sole_user(one):
        with sole_user(other), sole_user(one, name="a-digest"):
            pass
        with pytest.raises(InUseError), sole_user(one):
            pass
    with sole_user(one):
        pass


ENVIRONMENTS: list[dict[str, str]] = [
    {},
    {"XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "/hf", "XDG_CACHE_HOME": "/xdg"},
    {"HF_HOME": "~/hf"},
    {"HF_HOME": "$WHERE/hf"},
    {"HUGGINGFACE_HUB_CACHE": "/old", "HF_HOME": "/hf"},
    {"HF_HUB_CACHE": "/new", "HUGGINGFACE_HUB_CACHE": "/old"},
]

CACHE_VARIABLES = ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME")

ORACLE = f"""
import importlib, json, os, sys
os.environ["WHERE"] = "/here"
for name in {CACHE_VARIABLES}:
    os.environ.pop(name, None)
before = dict(os.environ)
from huggingface_hub import constants
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    print(importlib.reload(constants).HF_HUB_CACHE)
    os.environ.clear()
    os.environ.update(before)
"""


def test_cache_is_where_the_hub_library_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/here")
    command = [sys.executable, "-c", ORACLE, json.dumps(ENVIRONMENTS)]
    oracle = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    for name in CACHE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for variables, expected in zip(ENVIRONMENTS, oracle.stdout.splitlines(), strict=True):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert str(find_cache()) == expected


@pytest.mark.parametrize(
    ("variable", "value", "is_so"),
    [
        ("HF_HUB_OFFLINE", "1", True),
        ("TRANSFORMERS_OFFLINE", "yes", True),
        ("TRANSFORMERS_OFFLINE", "0", False),
    ],
)
def test_either_variable_of_the_hub_library_forbids_to_ask_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_so: bool
) -> None:
    for name in OFFLINE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert is_offline() is is_so
