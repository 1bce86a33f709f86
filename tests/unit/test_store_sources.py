"""Which model a user means."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mlxsup.store.sources import (
    RefusedModelError,
    Source,
    find_source,
    repository_named,
    servable,
)

from support.daemon.hub_caches import MODEL, write_repository
from support.models.safetensors_files import llama_arrays, write_folder


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("nothing", "there is no model 'nothing' on this machine"),
        ("nothing", "`mlxsup search nothing` looks for one on the hub"),
        ("smollm", "did you mean smollm2"),
        ("", "there is no model '' on this machine"),
        ("./nothing", " does not exist"),
        ("x.gguf", " does not exist"),
        ("https://h.example/datasets/a/b", "is the address of a dataset"),
        ("https://h.example/a/b/resolve/main/q.gguf", "is the address of one file"),
        ("https://h.example", "is not the address of a model"),
        ("https://h.example/a", "is not the address of a model"),
        ("h.example/../..", "is not the address of a model"),
        ("https://[h/a/b", "is not the address of a model"),
        ("~no-such-user/x", "~no-such-user/x does not exist"),
    ],
)
def test_name_of_no_model_is_refused(named: str, says: str) -> None:
    with pytest.raises(RefusedModelError) as caught:
        find_source(named)
    assert says in f"{caught.value.message}; {caught.value.hint}"


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("a/b", ("a/b", "main")),
        ("https://h.example/a/b", ("a/b", "main")),
        ("https://h.example/a/b/", ("a/b", "main")),
        ("h.example/a/b?x=1", ("a/b", "main")),
        ("https://h.example/a/b/tree/v2", ("a/b", "v2")),
        ("https://h.example/a/b/blob/v2/config.json", ("a/b", "v2")),
        ("b", ("", "")),
    ],
)
def test_repository_is_read_from_its_name_or_address(named: str, found: tuple[str, str]) -> None:
    assert repository_named(named) == found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with one model of LM Studio, and two of the same name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    for place in (".lmstudio/models/a/One", ".lmstudio/models/a/Twice", ".mlxsup/models/Twice"):
        write_folder(tmp_path / place, {"model_type": "llama"}, llama_arrays())
    return tmp_path


def test_copy_of_lm_studio_is_used_instead_of_a_download(home: Path) -> None:
    folder = home / ".lmstudio/models/a/One"
    for named in ("a/One", "One", "one"):
        source = find_source(named)
        assert (source.folder, source.repo) == (folder, ""), named
    assert find_source("a/Other") == Source(title="a/Other", folder=None, repo="a/Other")
    assert find_source("https://h.example/a/One/tree/v2", "v3").revision == "v3"
    other = find_source("https://h.example/a/One/tree/v2")
    assert (other.folder, other.revision) == (None, "v2"), "its revision is not known"
    (folder / "model.safetensors").unlink()
    assert find_source("a/One").folder is None, "it cannot be served"


def test_what_the_cache_has_in_part_is_still_to_be_downloaded(home: Path) -> None:
    snapshot = write_repository(home / "hub", "a/Cached", MODEL)
    assert find_source("a/Cached").folder == snapshot
    (snapshot / "config.json").unlink()
    assert find_source("a/Cached") == Source(title="a/Cached", folder=None, repo="a/Cached")


def test_name_that_two_models_have_is_refused_with_both(home: Path) -> None:
    with pytest.raises(RefusedModelError) as caught:
        find_source("twice")
    assert caught.value.code == "ambiguous"
    for place in (".lmstudio/models/a/Twice", ".mlxsup/models/Twice"):
        assert str(home / place) in caught.value.message
    named = caught.value.hint.removeprefix("`mlxsup add ").removesuffix("`")
    assert find_source(named).folder == home / ".lmstudio/models/a/Twice"
    assert find_source("a/Twice").folder == home / ".lmstudio/models/a/Twice"
    assert find_source("Twice").folder == home / ".mlxsup/models/Twice"


@pytest.mark.parametrize(
    ("named", "repo"),
    [
        ("qwen3:4b", "mlx-community/Qwen3-4B-4bit"),
        ("Qwen3:4B", "mlx-community/Qwen3-4B-4bit"),
        ("smollm2:latest", "mlx-community/SmolLM2-135M-Instruct"),
    ],
)
@pytest.mark.usefixtures("home")
def test_short_name_means_a_repository(named: str, repo: str) -> None:
    assert find_source(named).repo == repo


@pytest.mark.usefixtures("home")
def test_folder_that_is_cut_short_or_has_vanished_is_no_model(home: Path) -> None:
    source = find_source(str(home / ".lmstudio/models/a/One"))
    assert source.folder is not None
    weights = source.folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(RefusedModelError, match="is incomplete"):
        servable(source)
    shutil.rmtree(source.folder)
    with pytest.raises(RefusedModelError, match="does not exist"):
        servable(source)


def test_entry_of_another_revision_is_another_model() -> None:
    source = Source(title="o/n", folder=None, repo="o/n", revision="v2")
    assert source.is_that_of("o/n", "v2", "")
    assert not source.is_that_of("o/n", "main", "")
    assert not source.is_that_of("o/other", "v2", "")
    assert source.entry() == {"repo": "o/n", "revision": "v2"}


def test_two_revisions_of_a_repository_are_two_models_in_one_folder(tmp_path: Path) -> None:
    source = Source(title="o/n", folder=tmp_path, repo="o/n", revision="v2")
    assert not source.is_that_of("o/n", "main", str(tmp_path))
    assert source.is_that_of("o/n", "v2", "")
    assert source.is_that_of("", "", str(tmp_path)), "an entry that names the folder itself"


def test_folder_that_is_called_like_a_gguf_file_is_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "q.gguf"
    folder.mkdir()
    (tmp_path / "r.GGUF").touch()
    assert not find_source(str(folder)).is_gguf
    assert find_source(str(tmp_path / "r.GGUF")).is_gguf
