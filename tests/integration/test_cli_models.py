"""The models on this disk: `init`, `models`, `show` and `plan`."""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.machine import find_backend
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measurements

from support.cli.cli import run_cli
from support.daemon.daemon import Daemon, fake, toml_of, wait_for_state
from support.daemon.hub_caches import MODEL, write_folder, write_repository
from support.models.adapters import make_adapter
from support.models.safetensors_files import llama_arrays, llama_config
from support.models.safetensors_files import write_folder as write_weights
from support.models.tiny_encoder import make_tiny_encoder
from support.models.tiny_model import make_tiny_model

T5 = {**MODEL, "config.json": b'{"model_type": "t5"}'}
TITLE = "mlx-community/Tiny-Llama-Instruct-4bit"


@pytest.fixture(scope="module")
def stocked() -> Iterator[Path]:
    """A home with a real model in LM Studio's folder, others that cannot be loaded, and the
    configuration that `init` has written for it."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        home = Path(name)
        make_tiny_model(home / ".lmstudio/models" / TITLE)
        write_repository(home / "hub", "a/t5", T5)
        write_repository(home / "hub", "b/Second-8bit")
        # Its header says that it has 2 TiB; nothing but the header is read.
        arrays = llama_arrays(vocabulary=2**34, hidden=64)
        write_weights(home / ".mlxsup/models/huge", llama_config(), arrays)
        (home / ".mlxsup/models/huge/tokenizer.json").write_text('{"model": {}}')
        done = run_cli("init", **variables(home))
        assert done.returncode == 0, done.stderr
        assert f"wrote {home}/.mlxsup/config.toml" in done.stdout
        assert "  huge: Does not fit: needs " in done.stdout
        assert "mlxsup start --detach`" in done.stderr
        write_folder(home / ".mlxsup/models/late")
        yield home


def variables(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}


def json_of(home: Path, *arguments: str) -> dict[str, Any]:
    done = run_cli(*arguments, "--json", **variables(home))
    assert (done.returncode, done.stderr) == (0, "")
    value: dict[str, Any] = json.loads(done.stdout)
    return value


# ---------------------------------------------------------------- init


def test_init_writes_a_valid_file_that_names_what_it_leaves_out(stocked: Path) -> None:
    path = stocked / ".mlxsup/config.toml"
    text = path.read_text()
    first = text.splitlines()[0]
    assert first == "#:schema mlxsup.schema.json"
    schema = json.loads(path.with_name("mlxsup.schema.json").read_text())
    assert set(tomllib.loads(text)) <= set(schema["properties"])
    assert "# a/t5: mlx-lm does not support models of type t5" in text
    assert "# 2.2 KiB, llama, from Hugging Face cache. Fits into memory\n" in text
    assert "# [models.huge]" in text
    assert "Does not fit: needs " in text
    models = tomllib.loads(text)["models"]
    assert list(models) == ["second", "tiny-llama"]
    assert models["second"] == {"repo": "b/Second-8bit"}
    assert models["tiny-llama"]["path"].startswith(f"{stocked}/.lmstudio/models/")
    checked = run_cli("config", "check", str(path), **variables(stocked))
    assert checked.returncode == 0, checked.stderr
    value = json_of(stocked, "init", f"{stocked}/other.toml")
    assert [one["name"] for one in value["models"] if one["fits"]] == [
        "second",
        "tiny-llama",
        "late",
    ]
    assert [row["title"] for row in value["left_out"]] == ["a/t5"]


@pytest.mark.mlx
def test_init_says_what_models_can_do_that_make_more_than_text(home: Path) -> None:
    folder = home / ".mlxsup/models"
    make_tiny_model(folder / "sight", config={"model_type": "qwen3_vl", "vision_config": {}})
    make_tiny_encoder(folder / "bert", "bert")
    done = run_cli("init", **variables(home))
    assert re.search(r"^sight +text, images ", done.stdout, re.M), done
    assert re.search(r"^bert +embeddings ", done.stdout, re.M), done
    text = (home / ".mlxsup/config.toml").read_text()
    assert re.search("^# .* qwen3_vl, takes pictures, ", text, re.M), text
    assert re.search("^# .* bert, makes embeddings, ", text, re.M), text


def test_init_leaves_a_file_that_exists(home: Path) -> None:
    path = home / "mlxsup.toml"
    path.write_text("mine")
    done = run_cli("init", str(path), **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {path} already exists; nothing was changed\nhint: ")
    assert path.read_text() == "mine"
    path.unlink()
    path.symlink_to("nowhere")
    done = run_cli("init", str(path), **variables(home))
    assert (done.returncode, f"{path} already exists; nothing" in done.stderr) == (1, True)
    assert path.is_symlink()


def test_file_whose_schema_cannot_be_written_is_not_left(home: Path) -> None:
    write_folder(home / ".mlxsup/models/m")
    folder = home / "new"
    (folder / "mlxsup.schema.json" / "a folder").mkdir(parents=True)
    done = run_cli("init", str(folder / "c.toml"), **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {folder}/c.toml: " in done.stderr
    assert [path.name for path in folder.iterdir()] == ["mlxsup.schema.json"]
    (home / "file").touch()
    done = run_cli("init", f"{home}/file/c.toml", "--json", **variables(home))
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (1, "output")
    assert f"{home}/file" in error["message"]


def test_machine_without_models_gets_no_file(home: Path) -> None:
    done = run_cli("init", **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: no models found in the Hugging Face cache, ")
    assert not (home / ".mlxsup").exists()
    listed = run_cli("models", **variables(home))
    assert listed.returncode == 0
    assert listed.stdout.startswith("no models found in ")


# ---------------------------------------------------------------- models and show


def test_models_lists_what_is_configured_first_and_nothing_twice(stocked: Path) -> None:
    rows = json_of(stocked, "models")["models"]
    assert [(row["name"], row["title"], row["problem"]) for row in rows] == [
        ("second", "b/Second-8bit", None),
        ("tiny-llama", TITLE, None),
        (None, "a/t5", "mlx-lm does not support models of type t5"),
        (None, "huge", None),
        (None, "late", None),
    ]


def test_configured_model_that_is_gone_is_listed_with_its_problem(home: Path) -> None:
    config = home / "c.toml"
    config.write_text('[models.m]\nrepo = "a/gone"\n[models.f]\nengine = "fake"\n')
    rows = json_of(home, "models", "--config", str(config))["models"]
    assert (rows[0]["name"], rows[0]["repo"]) == ("m", "a/gone")
    assert "does not exist" in rows[0]["problem"]
    assert (rows[1]["name"], rows[1]["engine"]) == ("f", "fake")


@pytest.mark.parametrize(
    "name", ["tiny-llama", TITLE, "Tiny-Llama-Instruct-4bit", f"{{home}}/.lmstudio/models/{TITLE}"]
)
def test_show_takes_a_name_a_title_or_a_folder(stocked: Path, name: str) -> None:
    value = json_of(stocked, "show", name.format(home=stocked))
    assert value["model_type"] == "llama"
    assert value["context_length"] == 4096
    assert value["has_template"] is True
    assert value["needs"]["fits"] is True


def test_show_for_people_names_what_is_known_and_what_is_wrong(stocked: Path) -> None:
    text = run_cli("show", "tiny-llama", **variables(stocked)).stdout
    assert "chat template  yes" in text
    assert "licence        unknown" in text
    assert re.search("^memory +needs at least .*: fits, may grow to ", text, re.M)
    text = run_cli("show", "huge", **variables(stocked)).stdout
    assert re.search("^memory +needs at least .*: does not fit$", text, re.M)
    done = run_cli("show", "a/t5", **variables(stocked))
    assert done.returncode == 1
    assert "problem        mlx-lm does not support models of type t5" in done.stdout
    assert "memory" not in done.stdout
    value = run_cli("show", "a/t5", "--json", **variables(stocked))
    assert (value.returncode, value.stderr) == (1, "")
    assert json.loads(value.stdout)["problem"] == "mlx-lm does not support models of type t5"
    done = run_cli("show", "tiny-lama", "--json", **variables(stocked))
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (1, "unknown_model")
    assert error["hint"] == "did you mean tiny-llama?"


def test_show_exits_with_1_for_weights_that_are_cut_short(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    make_tiny_model(folder)
    weights = folder / "model.safetensors"
    assert run_cli("show", str(folder)).returncode == 0
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    done = run_cli("show", str(folder))
    assert done.returncode == 1
    assert f"problem        {weights} is incomplete: " in done.stdout
    assert done.stderr == "hint: copy or download this file again\n"
    assert json.loads(run_cli("show", str(folder), "--json").stdout)["needs"] is None


def test_show_says_how_answers_are_drawn_with_the_sampling_of_the_entry(home: Path) -> None:
    greedy = write_folder(home / "m")
    makers = b'{"do_sample": true, "temperature": 0.75, "top_p": 0.9}'
    warm = write_folder(home / "n", {**MODEL, "generation_config.json": makers})
    config = home / "c.toml"
    shown: list[str] = []
    for folder, sampling in (
        (greedy, {"top_p": 0.5}),
        (greedy, {"temperature": 0.25, "top_p": 0.5}),
        (warm, {"top_p": 0.5}),
    ):
        tables: dict[str, dict[str, Any]] = {
            "models.m": {"path": str(folder)},
            "models.m.sampling": sampling,
        }
        config.write_text(toml_of(tables))
        lines = run_cli("show", "m", "--config", str(config), **variables(home)).stdout
        shown += [line.split(maxsplit=1)[1] for line in lines.splitlines() if "sampling" in line]
    assert shown == [
        "always the likeliest token",
        "temperature 0.25, top_p 0.5",
        "temperature 0.75, top_p 0.5",
    ]


# ---------------------------------------------------------------- plan

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


def test_plan_names_what_fits_and_the_budget_that_would_do(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("name", ["tiny-llama", TITLE])
def test_plan_of_one_model_has_the_numbers_of_show(stocked: Path, name: str) -> None:
    plan = json_of(stocked, "plan", name)
    [model], needs = plan["models"], json_of(stocked, "show", name)["needs"]
    assert model["name"] == "tiny-llama"
    assert (model["needed"]["bytes"], model["memory_bytes"], plan["budget"]["bytes"]) == (
        needs["bytes"], needs["memory_bytes"], needs["budget_bytes"],
    )  # fmt: skip


@pytest.mark.mlx
def test_what_a_model_takes_is_known_before_a_load(home: Path) -> None:
    base = make_tiny_model(home / "m")
    adapter = make_adapter(home / "adapter", base)
    sight = make_tiny_model(home / "v", config={"model_type": "qwen3_vl", "vision_config": {}})
    models: dict[str, Any] = {
        "sight": {"path": str(sight)},
        "wise": {"path": str(sight), "adapters": {"poet": str(adapter)}, "drafts": str(base)},
        "bert": {"path": str(make_tiny_encoder(home / "b", "bert"))},
        "faked": fake(preload=False, fake={"takes_pictures": True}),
    }
    for table in models.values():
        table["preload"] = False
    with Daemon(models) as daemon, daemon.client() as client:
        config = str(daemon.config)
        known = {row["name"]: row["capabilities"] for row in client.status()["models"]}
        assert known == {
            "sight": ["text", "images"], "wise": ["text"], "bert": ["embeddings"],
            "faked": ["text", "images"],
        }  # fmt: skip
        listed = json.loads(run_cli("models", "--json", "--config", config).stdout)["models"]
        here = {row["name"]: row["capabilities"] for row in listed if row["name"] in known}
        assert here == known | {"faked": None}
        table = run_cli("models", "--config", config).stdout
        assert re.search(r"^sight +text, images ", table, re.M), table
        client.load("faked")
        noted = run_cli("status", "--config", config).stdout
        assert re.search(r"^faked .*takes pictures", noted, re.M), noted
        assert not re.search(r"^wise .*takes pictures", noted, re.M), noted
        shown = run_cli("show", "wise", "--config", config).stdout
        assert re.search(r"^capabilities +text$", shown, re.M), shown
        assert re.search(r"^adapters +wise:poet$", shown, re.M), shown
        assert re.search(rf"^drafts +{base}$", shown, re.M), shown


@pytest.mark.mlx
def test_run_of_a_model_that_writes_nothing_starts_no_daemon(home: Path) -> None:
    folder = str(make_tiny_encoder(home / "b", "bert"))
    config = home / ".mlxsup/config.toml"
    for arguments in ((folder, "hi", "--add"), ("em", "hi")):
        done = run_cli("run", *arguments, **variables(home))
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        assert "makes embeddings, not text" in done.stderr
        assert not (home / ".mlxsup/run").exists()
        assert not config.exists() or arguments[0] == "em"
        config.parent.mkdir(exist_ok=True)
        config.write_text(f'[models.em]\npath = "{folder}"\n')


@pytest.mark.mlx
def test_context_and_kind_are_the_same_in_models_plan_and_status_before_and_after_a_load(
    home: Path,
) -> None:
    """An encoder reads fewer tokens than its config.json declares: RoBERTa leaves out places, and
    sentence_bert_config.json may say less."""
    folders = {name: make_tiny_encoder(home / name, name) for name in ("bert", "xlm-roberta")}
    (folders["bert"] / "modules.json").write_text("[]")
    (folders["bert"] / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    models = {name: {"path": str(folder), "preload": False} for name, folder in folders.items()}
    models["short"] = {"path": str(make_tiny_model(home / "m")), "context_length": 100}
    with Daemon(models) as daemon, daemon.client() as client:
        config = str(daemon.config)

        def seen() -> list[list[tuple[int, str]]]:
            listed = json.loads(run_cli("models", "--json", "--config", config).stdout)["models"]
            rows = [row for row in listed if row["name"]]
            status = client.status()["models"]
            return [[(row["context_length"], row["task"]) for row in of] for of in (rows, status)]

        expected = [(64, "embed"), (158, "embed"), (100, "generate")]
        assert seen() == [expected, expected]
        for name in models:
            client.load(name)
        assert seen() == [expected, expected]


def test_plan_says_what_running_out_of_memory_has_raised(tmp_path: Path) -> None:
    write_weights(tmp_path / "m", llama_config(), llama_arrays())
    models = {"big": {"path": str(tmp_path / "m"), "preload": True}}
    config = write_config(tmp_path, models, memory_budget="2GiB")
    [before] = planned(config)["models"]
    assert before["raised_bytes"] == 0
    (tmp_path / "run").mkdir(exist_ok=True)
    files = fingerprint(stamp(tmp_path / "m"))
    Measurements(tmp_path / "run").learn_raised(str(tmp_path / "m"), find_backend(), files, GIB)
    [after] = planned(config)["models"]
    assert after["raised_bytes"] == GIB
    assert after["needed"]["bytes"] == before["needed"]["bytes"] + GIB
    assert (after["cache"], after["process"]) == (before["cache"], before["process"])
    shown = run_cli("plan", "--config", str(config)).stdout.splitlines()
    assert "  needs 1.00 GiB more than estimated, because it ran out of memory before" in shown
    # It never keeps a model out that would fit without it.
    config = write_config(tmp_path, models, memory_budget="1GiB")
    plan = planned(config)
    assert plan["fits"]
    assert plan["models"][0]["needed"]["bytes"] == GIB


def test_plan_goes_on_without_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    models = {"gone": {"path": str(tmp_path / "gone")}, "here": given("100MiB")}
    plan = planned(write_config(tmp_path, models, memory_budget="512MiB"))
    assert not plan["fits"]
    gone, here = plan["models"]
    assert gone["problem"] == f"the model folder {tmp_path / 'gone'} does not exist"
    assert here["is_loaded"]
    done = run_cli("plan", "--config", str(tmp_path / "mlxsup.toml"))
    assert f"  the model folder {tmp_path / 'gone'} does not exist" in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1] == "the other models fit; these cannot be loaded: gone"


def test_budget_larger_than_the_machine_is_a_mistake(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path, {"m": given("100MiB")}, memory_budget="900TiB")
    for command in (["plan", "--config"], ["config", "check"], ["start", "--config"]):
        done = run_cli(*command, str(config))
        said = {"plan": f"configuration: {config}\n\n", "config": f"checking {config}\n"}
        assert (done.returncode, done.stdout) == (78, said.get(command[0], ""))
        assert (
            "mlxsup.toml:3: supervisor.memory_budget must be at most what this machine has ("
            in (done.stderr)
        )


@pytest.mark.mlx
def test_plan_takes_measurements_of_a_model_that_was_loaded(tmp_path: Path) -> None:
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
        assert f"{measured} is ignored (it is damaged); models are measured again" in (
            done.stdout.splitlines()
        )
