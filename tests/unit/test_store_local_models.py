"""The models on a machine: in the Hugging Face cache, LM Studio's folders, and our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsup.store.local_models import (
    FoundModel,
    Origin,
    find_models,
    lm_studio_folders,
    short_name,
)
from mlxsup.supervisor.config.lines import MODEL_NAME

from support.daemon.hub_caches import COMMIT, MODEL, REPO, write_folder, write_repository

GGUF = {"m-Q4_0.gguf": b"GGUF"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def found_models() -> dict[str, FoundModel]:
    """By title; no title is found twice."""
    found = find_models()
    titles = [model.title for model in found]
    assert len(set(titles)) == len(titles)
    return dict(zip(titles, found, strict=True))


def test_every_place_is_searched(tmp_path: Path) -> None:
    assert found_models() == {}
    snapshot = write_repository(tmp_path / "hub")
    write_folder(tmp_path / ".lmstudio/models/publisher/name")
    write_folder(tmp_path / ".cache/lm-studio/models/old/name")
    write_folder(tmp_path / ".mlxsup/models/mine")
    found = found_models()
    assert {title: model.origin for title, model in found.items()} == {
        REPO: Origin.HUB,
        "publisher/name": Origin.LM_STUDIO,
        "old/name": Origin.LM_STUDIO,
        "mine": Origin.OWN,
    }
    assert all(model.problem is None for model in found.values())
    model = found[REPO]
    assert (model.path, model.repo, model.revision) == (snapshot, REPO, "main")
    assert found["mine"].repo == ""


def test_repository_without_main_is_found(tmp_path: Path) -> None:
    write_repository(tmp_path / "hub", "a/tag", revision="v1.0")
    write_repository(tmp_path / "hub", "a/tag", revision="v2.0", commit="b" * 40)
    write_repository(tmp_path / "hub", "a/commit", revision=None)
    found = found_models()
    assert {title: model.revision for title, model in found.items()} == {
        "a/tag": "v1.0",
        "a/commit": COMMIT,
    }


def test_models_that_cannot_be_served_have_a_problem(
    tmp_path: Path,
) -> None:
    hub = tmp_path / "hub"
    write_repository(hub, "a/gguf", GGUF)
    write_repository(hub, "a/t5", {**MODEL, "config.json": b'{"model_type": "t5"}'})
    write_repository(hub, "a/cut", {n: c for n, c in MODEL.items() if n != "model.safetensors"})
    write_repository(hub, "a/diffusers", {"model_index.json": b"{}"})
    write_repository(hub, "a/empty", {})
    sorts = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    write_repository(hub, "a/sorts", {**MODEL, "config.json": json.dumps(sorts).encode()})
    write_folder(tmp_path / ".lmstudio/models/b/gguf", {"M.GGUF": b"GGUF"})
    problems = {
        title: model.problem.text if model.problem else ""
        for title, model in found_models().items()
    }
    assert set(problems) == {"a/gguf", "a/t5", "a/cut", "a/sorts", "b/gguf"}
    assert problems["a/sorts"] == "it sorts texts into 2 classes, and ranks none"
    assert "GGUF" in problems["a/gguf"]
    assert "GGUF" in problems["b/gguf"]
    assert problems["a/t5"] == "mlx-lm does not support models of type t5"
    assert "model.safetensors does not exist" in problems["a/cut"]


def test_shared_folder_is_found_once(tmp_path: Path) -> None:
    snapshot = write_repository(tmp_path / "disk")
    (tmp_path / "hub").symlink_to(tmp_path / "disk")
    publisher = tmp_path / ".lmstudio/models/publisher"
    publisher.mkdir(parents=True)
    (publisher / "name").symlink_to(snapshot)
    assert list(found_models()) == [REPO]


@pytest.mark.parametrize("content", ["", "\0", "/nowhere\n", "["])
def test_broken_settings_of_lm_studio_are_passed_over(content: str, tmp_path: Path) -> None:
    usual = tmp_path / ".lmstudio" / "models"
    usual.mkdir(parents=True)
    (tmp_path / ".lmstudio-home-pointer").write_text(content)
    (tmp_path / ".lmstudio" / "settings.json").write_text(content)
    assert lm_studio_folders() == [usual]


def test_lm_studio_may_keep_its_models_elsewhere(tmp_path: Path) -> None:
    chosen = tmp_path / "disk"
    home = tmp_path / "moved"
    for folder in (chosen, home / "models"):
        folder.mkdir(parents=True)
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{home}\n")
    (home / "settings.json").write_text(json.dumps({"downloadsFolder": str(chosen)}))
    assert lm_studio_folders() == [chosen, home / "models"]


# ---------------------------------------------------------------- short names


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("mlx-community/SmolLM2-135M-Instruct-4bit", "smollm2-135m"),
        ("mlx-community/Qwen3-0.6B-4bit-DWQ", "qwen3-0.6b"),
        ("mlx-community/Llama-3.2-1B-Instruct-bf16", "llama-3.2-1b"),
        ("lmstudio-community/gemma-3-4b-it-MLX-8bit", "gemma-3-4b"),
        ("a/Qwen3-Italian-Modelled-4bit", "qwen3-italian-modelled"),
        ("gpt2", "gpt2"),
        ("a/Modèle 7B", "mod-le-7b"),
        ("a/--", "model"),
    ],
)
def test_short_name_of_a_title(title: str, name: str) -> None:
    assert short_name(title, set()) == name


def test_short_names_of_long_titles_differ() -> None:
    taken: set[str] = set()
    for _ in range(3):
        taken.add(short_name("x" * 70, taken))
    assert taken == {"x" * 64, f"{'x' * 58}-2", f"{'x' * 58}-3"}


@given(st.lists(st.text("aA/-._ 4bité", min_size=1, max_size=70), max_size=6))
def test_short_names_are_valid_and_different(titles: list[str]) -> None:
    taken = {"mlxsup", "mlxsup-gateway"}
    for title in titles:
        name = short_name(title, taken)
        assert MODEL_NAME.fullmatch(name)
        assert name == name.lower()
        assert name not in taken
        taken.add(name)
