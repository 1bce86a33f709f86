"""The models on this disk: `init`, `models`, `show` and `plan`."""

from __future__ import annotations

import json
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.machine import find_backend
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measurements, Raised

from support.cli.cli import Piped, run_cli
from support.daemon.daemon import Daemon, fake, toml_of, wait_for_state
from support.daemon.hub_caches import MODEL, write_folder, write_repository
from support.models.safetensors_files import llama_arrays, llama_config
from support.models.safetensors_files import write_folder as write_weights
from support.models.tiny_model import make_tiny_model

BERT = {**MODEL, "config.json": b'{"model_type": "bert"}'}


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


GIB = 2**30
MIB = 2**20


def write_config(folder: Path, models: dict[str, dict[str, Any]], **supervisor: Any) -> Path:
    """A configuration whose runtime folder is its own."""
    path = folder / "mlxsup.toml"
    top = {"runtime_dir": str(folder / "run"), **supervisor}
    path.write_text(toml_of({"supervisor": top} | {f"models.{n}": e for n, e in models.items()}))
    return path


def given(memory: str, **more: Any) -> dict[str, Any]:
    """A model that needs what its entry says."""
    return fake(memory=memory, **more)


def planned(config: Path) -> dict[str, Any]:
    """The plan as programs get it."""
    done = run_cli("plan", "--config", str(config), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_what_fits_and_what_does_not_and_what_helps(tmp_path: Path) -> None:
    models = {
        "small": given("100MiB"),
        "large": given("300MiB"),
        "later": given("250MiB", preload=False),
    }
    plan = planned(write_config(tmp_path, models, memory_budget="512MiB"))
    assert plan["budget"]["bytes"] == 512 * MIB
    assert plan["budget"]["reason"] == "memory_budget"
    assert (plan["fits"], plan["change"], plan["needed_bytes"]) == (True, None, 400 * MIB)
    rows = {row["name"]: row for row in plan["models"]}
    assert [row["is_loaded"] for row in rows.values()] == [True, True, False]
    assert rows["later"]["goes"] == ["large"]
    assert rows["small"]["needed"] == {"bytes": 100 * MIB, "source": "given"}

    plan = planned(write_config(tmp_path, models, memory_budget="300MiB"))
    assert (plan["fits"], plan["needed_bytes"]) == (False, 100 * MIB)
    assert plan["change"] == 'set memory_budget to at least "400.0 MiB"'
    # Whoever follows the advice gets a plan that fits.
    assert planned(write_config(tmp_path, models, memory_budget="400.0 MiB"))["fits"]


def test_what_running_out_of_memory_has_raised_is_said_in_one_sentence(tmp_path: Path) -> None:
    write_weights(tmp_path / "m", llama_config(), llama_arrays())
    models = {"big": {"path": str(tmp_path / "m"), "preload": True}}
    config = write_config(tmp_path, models, memory_budget="2GiB")
    [before] = planned(config)["models"]
    assert before["raised_bytes"] == 0
    (tmp_path / "run").mkdir(exist_ok=True)
    kept = Raised(
        path=str(tmp_path / "m"),
        backend=find_backend(),
        fingerprint=fingerprint(stamp(tmp_path / "m")),
        raised_bytes=GIB,
    )
    Measurements(tmp_path / "run").learn_raised(kept)
    [after] = planned(config)["models"]
    assert after["raised_bytes"] == GIB
    assert after["needed"]["bytes"] == before["needed"]["bytes"] + GIB
    assert (after["cache"], after["process"]) == (before["cache"], before["process"])
    shown = run_cli("plan", "--config", str(config)).stdout.splitlines()
    assert "  needs 1.00 GiB more than otherwise, because it ran out of memory before" in shown
    # It never keeps a model out that would fit without it.
    config = write_config(tmp_path, models, memory_budget="1GiB")
    plan = planned(config)
    assert plan["fits"]
    assert plan["models"][0]["needed"]["bytes"] == GIB


def test_a_folder_that_cannot_be_read_is_a_row_and_the_rest_is_planned(tmp_path: Path) -> None:
    models = {"gone": {"path": str(tmp_path / "gone")}, "here": given("100MiB")}
    plan = planned(write_config(tmp_path, models, memory_budget="512MiB"))
    assert not plan["fits"]
    gone, here = plan["models"]
    assert gone["problem"] == f"the model folder {tmp_path / 'gone'} does not exist"
    assert here["is_loaded"]
    done = run_cli("plan", "--config", str(tmp_path / "mlxsup.toml"))
    assert f"  the model folder {tmp_path / 'gone'} does not exist" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "everything else fits; cannot be loaded: gone"


def test_a_budget_larger_than_the_machine_is_a_mistake_of_the_configuration(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, {"m": given("100MiB")}, memory_budget="900TiB")
    for command in (["plan", "--config"], ["config", "check"], ["start", "--config"]):
        done = run_cli(*command, str(config))
        said = {"plan": f"configuration: {config}\n\n", "config": f"checking {config}\n"}
        assert (done.returncode, done.stdout) == (78, said.get(command[0], ""))
        assert "mlxsup.toml:3: supervisor.memory_budget takes at most what this machine has (" in (
            done.stderr
        )


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    done = run_cli("plan", "--config", str(tmp_path / "none.toml"))
    assert (done.returncode, done.stdout) == (78, "")
    missing = tmp_path / "none.toml"
    assert done.stderr.splitlines() == [
        f"error: no configuration file at {missing}",
        f"hint: write one with `mlxsup init {missing}`, or name another one",
    ]


@pytest.mark.mlx
def test_a_model_that_was_loaded_once_is_measured(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    entry = {"path": str(folder), "preload": True, "max_concurrency": 2}
    with Daemon({"tiny": entry}, {"memory_budget": "1GiB"}) as daemon:
        with daemon.client() as client:
            before = planned(daemon.config)["models"][0]
            wait_for_state(client, "tiny", "READY")
        after = planned(daemon.config)["models"][0]
        assert after["needed"]["source"] == "measured"
        for part in ("weights", "process", "cache"):
            assert after[part]["source"] == "measured"
        # What was estimated of its arrays was right; its process holds MLX and a tokenizer.
        assert before["cache"]["bytes"] == after["cache"]["bytes"]
        assert abs(before["weights"]["bytes"] - after["weights"]["bytes"]) < 2**16
        assert 30 * MIB < after["process"]["bytes"] < GIB
        # A changed file is another model.
        (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
        assert planned(daemon.config)["models"][0]["weights"]["source"] == "estimated"
        measured = daemon.folder / "run" / FILE_NAME
        measured.write_text("{")
        done = run_cli("plan", "--config", str(daemon.config))
        assert done.returncode == 0
        assert f"{measured} is not used (it is damaged): models are measured again" in (
            done.stdout.splitlines()
        )
