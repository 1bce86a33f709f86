"""`mlxsup convert`: mlx-lm's own conversion and our GGUF reader, each in a child process."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import psutil
import pytest

from support.cli.cli import Piped, check_plain, run_cli
from support.daemon.hub_caches import write_folder, write_repository
from support.eventually import eventually
from support.gateway.json_schemas import problems
from support.models.tiny_gguf import tiny_gguf
from support.models.tiny_model import make_tiny_model

pytestmark = pytest.mark.mlx


@pytest.fixture
def home() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mlxsup-t-", dir="/tmp") as name:
        yield Path(name)


def variables(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}


def write_gguf(path: Path, **changes: str) -> Path:
    """A file that MLX itself has written; it says of itself only which architecture it has."""
    entries: dict[str, mx.array | str | list[str]] = {"general.architecture": "llama", **changes}
    mx.save_gguf(str(path), {"token_embd.weight": mx.zeros((8, 32))}, entries)
    return path


def test_a_folder_is_quantised_into_a_new_one_that_is_served(home: Path) -> None:
    source = make_tiny_model(home / "Tiny-bf16")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    done = run_cli("convert", str(source), "--quantize", "--json", **variables(home))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert problems(done.stdout, ["convert"]) == []
    value = json.loads(done.stdout)
    target = home / ".mlxsup/models/tiny"
    assert value["path"] == str(target)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    assert value["size_bytes"] < (source / "model.safetensors").stat().st_size / 2
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    shown = json.loads(run_cli("show", "tiny", "--json", **variables(home)).stdout)
    assert (shown["problem"], shown["quantization"]) == (None, "4 bit, groups of 64")
    with Piped("start", "--model", str(target), **variables(home)) as started:
        while "LOADING → READY" not in started.line():
            pass
        assert started.interrupt()[0] == 0


def test_what_is_quantised_already_is_refused_and_nothing_is_left(home: Path) -> None:
    config = {"quantization": {"bits": 4, "group_size": 64}}
    source = make_tiny_model(home / "m", config=config)
    done = run_cli("convert", str(source), f"{home}/new", "--bits", "8", **variables(home))
    assert done.returncode == 1
    *_, error, hint = done.stderr.splitlines()
    assert error == f"error: {source} is quantised already"
    assert hint == f"hint: `mlxsup show {source}` says what it is"
    assert sorted(path.name for path in home.iterdir()) == ["m"]


def test_a_repository_of_the_cache_is_read_where_it_is(home: Path) -> None:
    model = make_tiny_model(home / "m")
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    write_repository(home / "hub", "a/Tiny", files)
    done = run_cli("convert", "a/Tiny", "--bits", "8", **variables(home))
    assert done.returncode == 0, done.stderr
    check_plain(done.stdout + done.stderr)
    target = home / ".mlxsup/models/tiny"
    assert done.stdout.startswith(f"wrote {target} (")
    assert done.stderr.splitlines()[-1] == f"hint: serve it with `mlxsup start --model {target}`"


def test_a_gguf_file_goes_to_our_own_reader_whose_words_reach_the_user(home: Path) -> None:
    source = write_gguf(home / "m.gguf", **{"general.architecture": "mamba"})
    done = run_cli("convert", str(source), **variables(home))
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert said[0].startswith("reading m.gguf")
    assert said[-2] == f"error: {source} holds a mamba model; only llama can be converted"
    assert said[-1].startswith("hint: if the file may be cut off, download it again; ")
    done = run_cli("convert", str(source), "--quantize", **variables(home))
    assert done.returncode == 64
    assert not list((home / ".mlxsup").rglob("*.partial"))


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_target_that_exists_is_left_as_it_is(home: Path, more: list[str]) -> None:
    source = make_tiny_model(home / "m")
    (home / "new").mkdir()
    arguments = ["convert", str(source), f"{home}/new", "--quantize", *more]
    done = run_cli(*arguments, **variables(home))
    assert done.returncode == 1
    said = done.stdout + done.stderr
    assert f"{home}/new exists; it is left as it is" in said
    assert f"name another folder: `mlxsup convert {source} TARGET --quantize`" in said
    assert list((home / "new").iterdir()) == []


@pytest.mark.parametrize("source", ["a/missing", "missing.gguf", "parent"])
def test_a_source_that_is_no_model_is_named_for_what_it_is(home: Path, source: str) -> None:
    write_folder(home / "parent" / "m")
    given = source if source == "a/missing" else f"{home}/{source}"
    done = run_cli("convert", given, "--json", **variables(home))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "model_folder"
    assert source in error["message"]
    if source == "missing.gguf":
        assert error["message"] == f"there is no file {home}/missing.gguf"


def test_a_damaged_model_is_an_error_of_one_line(home: Path) -> None:
    source = make_tiny_model(home / "m", config={"model_type": "nonsense"})
    done = run_cli("convert", str(source), f"{home}/new", **variables(home))
    assert done.returncode == 1
    error = done.stderr.splitlines()[-2]
    assert error.startswith(f"error: {source} cannot be converted: ")
    assert "nonsense" in error
    assert sorted(path.name for path in home.iterdir()) == ["m"]


def test_a_valid_gguf_file_becomes_a_folder_that_is_served(home: Path) -> None:
    source = tiny_gguf(home / "tiny.gguf")
    done = run_cli("convert", str(source), f"{home}/new", **variables(home))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"wrote {home}/new (")
    with Piped("start", "--model", f"{home}/new", **variables(home)) as started:
        while "LOADING → READY" not in started.line():
            pass
        assert started.interrupt()[0] == 0


def test_a_child_that_is_killed_is_named_with_its_signal(home: Path) -> None:
    """As the system does it if memory is short; the child still imports MLX then."""
    source = make_tiny_model(home / "m")
    with Piped("convert", str(source), f"{home}/new", **variables(home)) as converting:
        child = eventually(lambda: child_of(converting.process.pid))
        os.kill(child, signal.SIGKILL)
        code, _, err = converting.end()
    assert code == 1
    assert "error: the conversion ended with signal 9" in err
    assert "hint: it may need more memory than there is" in err


def test_ctrl_c_ends_the_child_which_got_no_token_as_well(home: Path) -> None:
    source = make_tiny_model(home / "m")
    given = variables(home) | {"HF_TOKEN": "secret"}
    with Piped("convert", str(source), f"{home}/new", **given) as converting:
        child = eventually(lambda: child_of(converting.process.pid))
        # Between fork and exec it still has its parent's.
        eventually(lambda: psutil.Process(child).environ().get("HF_HUB_OFFLINE") == "1")
        assert "HF_TOKEN" not in psutil.Process(child).environ()
        code, out, _ = converting.interrupt()
    assert (code, out) == (130, "")
    assert not psutil.pid_exists(child)
    assert sorted(path.name for path in home.iterdir()) == ["m"]


def child_of(pid: int) -> int:
    """The pid of a process's only child; 0 while there is none."""
    children = psutil.Process(pid).children()
    return children[0].pid if children else 0
