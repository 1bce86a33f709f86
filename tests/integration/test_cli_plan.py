"""`mlxsup plan`: what fits into memory, said without a daemon and measured by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxsup.supervisor.memory.backend import find_backend
from mlxsup.supervisor.memory.folder import fingerprint, stamp
from mlxsup.supervisor.memory.measurements import FILE_NAME, Measurements, Raised

from support.cli import COLUMNS, ESCAPE, on_terminal, run_cli
from support.daemon import Daemon, fake, toml_of, wait_for_state
from support.safetensors_files import llama_arrays, llama_config, write_folder
from support.tiny_model import make_tiny_model

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


def test_people_get_a_table_with_estimates_marked(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays(vocabulary=2**20, hidden=512))
    models = {"big": {"path": str(tmp_path / "m"), "context_length": 2048, "preload": True}}
    config = write_config(tmp_path, models, memory_budget="4GiB")
    done = run_cli("plan", "--config", str(config))
    assert (done.returncode, done.stderr) == (0, "")
    head, _, *lines = done.stdout.splitlines()
    assert head == f"configuration: {config}"
    assert lines[0] == "budget: 4.00 GiB (memory_budget)"
    assert lines[2].split() == [
        "MODEL", "NEEDS", "WEIGHTS", "PROCESS", "CACHE", "CONTEXT", "ROWS", "FITS",
    ]  # fmt: skip
    name, *figures = lines[3].split()
    assert (name, figures[:6:2]) == ("big", ["~1.26", "~1.01", "~256.0"])
    assert figures[-3:] == ["2048", "8/8", "yes"]
    assert lines[-1] == "everything fits: big (1.26 GiB)"


def test_what_running_out_of_memory_has_raised_is_said_in_one_sentence(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
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


def test_on_a_terminal_nothing_is_wider_than_it(tmp_path: Path) -> None:
    long = "a-model-with-a-very-long-name-that-no-column-of-a-table-can-hold"
    models = {
        long: given("100MiB"),
        "broken": {"path": "/nowhere/" + "a-long-path/" * 8, "preload": True},
        "later": given("500MiB", preload=False),
        "never": given("900MiB", preload=False),
    }
    config = write_config(tmp_path, models, memory_budget="512MiB")
    lines = ESCAPE.sub("", on_terminal(["plan", "--config", str(config)])).splitlines()
    assert max(map(len, lines)) <= COLUMNS
    text = " ".join(line.strip() for line in lines)
    assert ("a-long-path/" * 8).rstrip("/") in text.replace(" ", "")
    fits = [line.split()[-1] for line in lines if line.startswith(("a-model", "later", "never"))]
    assert fits == ["yes", "instead", "no"]
    assert "loaded in place of" in text
    assert "388.0 MiB more than there is" in text


def test_a_narrow_terminal_does_without_some_columns(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"a-model-with-a-long-name": given("100MiB")})
    seen = on_terminal(["plan", "--config", str(config)], COLUMNS="40")
    lines = ESCAPE.sub("", seen).splitlines()
    assert max(map(len, lines)) <= 40
    header = next(line for line in lines if line.startswith("MODEL"))
    assert header.split() == ["MODEL", "NEEDS", "CONTEXT", "ROWS", "FITS"]
    assert any(line.startswith("a-model") and line.endswith("yes") for line in lines)


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
