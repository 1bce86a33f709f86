"""`init`, `models` and `show`: the models on this machine, without a daemon."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.cli import ESCAPE, Piped, on_terminal, run_cli
from support.hub_caches import MODEL, write_folder, write_repository
from support.safetensors_files import llama_arrays, llama_config
from support.safetensors_files import write_folder as write_weights
from support.tiny_model import make_tiny_model

LARGE = "a/Large-70B-4bit"
BERT = {**MODEL, "config.json": b'{"model_type": "bert"}'}
WIDTHS = ("40", "80", "200")


@pytest.fixture
def home() -> Iterator[Path]:
    """A home with a real model in LM Studio's folder, and what cannot be served in the cache."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        home = Path(name)
        make_tiny_model(home / ".lmstudio/models/mlx-community/Tiny-Llama-Instruct-4bit")
        write_repository(home / "hub", "a/bert", BERT)
        yield home


def variables(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}


def json_of(home: Path, *arguments: str) -> dict[str, Any]:
    done = run_cli(*arguments, "--json", **variables(home))
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_three_commands_lead_from_a_home_with_models_to_an_answer(home: Path) -> None:
    done = run_cli("init", **variables(home))
    assert done.returncode == 0
    assert f"wrote {home}/.mlxsup/config.toml" in done.stdout
    assert "mlxsup start --detach`" in done.stderr
    with Piped("start", **variables(home)) as started:
        assert started.line().startswith("listening at ")
        asked = run_cli("generate", "tiny-llama", "hello", "--max-tokens", "3", **variables(home))
        assert asked.returncode == 0, asked.stderr
        assert started.interrupt()[0] == 0


@pytest.mark.parametrize("word", ["init", "start"])
def test_a_file_whose_schema_cannot_be_written_is_not_left(home: Path, word: str) -> None:
    model = home / ".lmstudio/models/mlx-community/Tiny-Llama-Instruct-4bit"
    command = ["init"] if word == "init" else ["start", "--model", str(model), "--save"]
    folder = home / "new"
    (folder / "mlxsup.schema.json" / "of somebody").mkdir(parents=True)
    done = run_cli(*command, str(folder / "c.toml"), **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {folder}/c.toml: " in done.stderr
    assert [path.name for path in folder.iterdir()] == ["mlxsup.schema.json"]


def test_the_file_is_valid_and_names_what_it_leaves_out(home: Path) -> None:
    write_repository(home / "hub", "b/Second-8bit")
    value = json_of(home, "init", str(home / "mlxsup.toml"))
    assert [model["name"] for model in value["models"]] == ["second", "tiny-llama"]
    assert [row["title"] for row in value["left_out"]] == ["a/bert"]
    text = (home / "mlxsup.toml").read_text()
    first = text.splitlines()[0]
    assert first == "#:schema mlxsup.schema.json"
    schema = json.loads((home / first.split()[1]).read_text())
    assert set(tomllib.loads(text)) <= set(schema["properties"])
    assert "# a/bert: mlx-lm serves no models of type bert" in text
    assert "# 158 B, llama, from Hugging Face cache. Fits: needs about " in text
    models = tomllib.loads(text)["models"]
    assert models["second"] == {"repo": "b/Second-8bit"}
    assert models["tiny-llama"]["path"].startswith(f"{home}/.lmstudio/models/")
    checked = run_cli("config", "check", str(home / "mlxsup.toml"), **variables(home))
    assert checked.returncode == 0, checked.stderr


def test_a_file_that_exists_is_left_as_it_is(home: Path) -> None:
    path = home / "mlxsup.toml"
    path.write_text("mine")
    done = run_cli("init", str(path), **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {path} exists; it is left as it is\nhint: ")
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to("nowhere")
    assert run_cli("init", str(path), **variables(home)).returncode == 1
    assert path.is_symlink()


def test_a_file_that_cannot_be_written_is_an_error_with_its_name(home: Path) -> None:
    (home / "file").touch()
    done = run_cli("init", f"{home}/file/c.toml", "--json", **variables(home))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert (error["code"], f"{home}/file" in error["message"]) == ("output", True)


def test_a_machine_without_models_gets_no_file(home: Path) -> None:
    empty = variables(home) | {"HOME": f"{home}/other", "HF_HUB_CACHE": f"{home}/none"}
    done = run_cli("init", **empty)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no models in the Hugging Face cache, ")
    assert not (home / "other").exists()
    listed = run_cli("models", **empty)
    assert listed.returncode == 0
    assert listed.stdout.startswith("no models in ")


def test_a_model_that_can_never_fit_stands_in_a_comment(home: Path) -> None:
    """Its header says that it has 2 TiB; nothing but the header is read."""
    arrays = llama_arrays(vocabulary=2**34, hidden=64)
    write_weights(home / ".mlxsup/models/huge", llama_config(), arrays)
    (home / ".mlxsup/models/huge/tokenizer.json").write_text("{}")
    done = run_cli("init", f"{home}/c.toml", **variables(home))
    assert done.returncode == 0, done.stderr
    text = (home / "c.toml").read_text()
    assert "# [models.huge]" in text
    assert "Does not fit: needs " in text
    assert set(tomllib.loads(text)["models"]) == {"tiny-llama"}


def test_models_lists_what_is_configured_first_and_nothing_twice(home: Path) -> None:
    assert run_cli("init", **variables(home)).returncode == 0
    write_folder(home / ".mlxsup/models/late")
    rows = json_of(home, "models")["models"]
    assert [(row["name"], row["title"]) for row in rows] == [
        ("tiny-llama", "mlx-community/Tiny-Llama-Instruct-4bit"),
        (None, "a/bert"),
        (None, "late"),
    ]
    assert rows[1]["problem"] == "mlx-lm serves no models of type bert"


def test_a_configured_model_that_is_gone_is_listed_with_its_problem(home: Path) -> None:
    config = home / "c.toml"
    config.write_text('[models.m]\nrepo = "a/gone"\n[models.f]\nengine = "fake"\n')
    rows = json_of(home, "models", "--config", str(config))["models"]
    assert (rows[0]["name"], rows[0]["repo"]) == ("m", "a/gone")
    assert "does not exist" in rows[0]["problem"]
    assert (rows[1]["name"], rows[1]["engine"]) == ("f", "fake")


@pytest.mark.parametrize(
    "name",
    [
        "tiny-llama",
        "mlx-community/Tiny-Llama-Instruct-4bit",
        "Tiny-Llama-Instruct-4bit",
        "{home}/.lmstudio/models/mlx-community/Tiny-Llama-Instruct-4bit",
    ],
)
def test_show_takes_a_name_a_title_or_a_folder(home: Path, name: str) -> None:
    assert run_cli("init", **variables(home)).returncode == 0
    value = json_of(home, "show", name.format(home=home))
    assert value["model_type"] == "llama"
    assert value["context_length"] == 4096
    assert value["has_template"] is True
    assert value["needs"]["fits"] is True
    text = run_cli("show", name.format(home=home), **variables(home)).stdout
    assert "chat template  yes" in text
    assert "licence        not said" in text


def test_show_of_a_name_that_nobody_has_suggests_one_that_is_close(home: Path) -> None:
    assert run_cli("init", **variables(home)).returncode == 0
    done = run_cli("show", "tiny-lama", "--json", **variables(home))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert (error["code"], error["hint"]) == ("unknown_model", "did you mean tiny-llama?")


def test_show_says_why_a_folder_cannot_be_served(home: Path) -> None:
    done = run_cli("show", "a/bert", **variables(home))
    assert done.returncode == 1
    assert "problem        mlx-lm serves no models of type bert" in done.stdout
    assert "memory" not in done.stdout
    value = run_cli("show", "a/bert", "--json", **variables(home))
    assert (value.returncode, value.stderr) == (1, "")
    assert json.loads(value.stdout)["problem"] == "mlx-lm serves no models of type bert"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("arguments", [["init"], ["models"], ["show", "tiny-llama"]], ids=" ".join)
def test_on_a_terminal_of_any_width_nothing_is_cut_but_paths_that_are_longer(
    home: Path, arguments: list[str], width: str
) -> None:
    if arguments != ["init"]:
        assert run_cli("init", **variables(home)).returncode == 0
    shown = ESCAPE.sub("", on_terminal(arguments, COLUMNS=width, **variables(home)))
    notes = ("hint: ", "wrote ")
    lines = [line for line in shown.splitlines() if not line.startswith(notes)]
    assert max(map(len, lines)) <= int(width)
    words = "".join(shown.split())
    assert "tiny-llama" in words
    assert "Tiny-Llama-Instruct-4bit" in words
    if arguments == ["models"]:
        assert "mlx-lmservesnomodelsoftypebert" in words
