"""`mlxsup convert`: a real conversion in a child process, and played children that fail."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from support.cli.cli import Piped, check_plain, run_cli
from support.daemon.hub_caches import write_folder, write_repository
from support.eventually import eventually
from support.gateway.json_schemas import problems
from support.models.tiny_gguf import tiny_gguf


def variables(home: Path, **more: str) -> dict[str, str]:
    here = {"HOME": str(home), "HF_HUB_CACHE": str(home / "hub"), "HF_HOME": str(home / "hf")}
    return {**here, **more}


PLAYED = """
import os, signal, sys, time
if "mlxsup.worker.engines.mlx.conversion" in sys.orig_argv:
    {does}
"""


def played(folder: Path, does: str) -> dict[str, str]:
    """Variables with which the child of a conversion does this instead."""
    first = folder / "first"
    first.mkdir()
    (first / "sitecustomize.py").write_text(PLAYED.format(does=does))
    return variables(folder, PYTHONPATH=os.pathsep.join([str(first), os.environ["PYTHONPATH"]]))


@pytest.mark.mlx
def test_gguf_file_becomes_a_folder_and_that_a_smaller_one_which_is_served(home: Path) -> None:
    file = tiny_gguf(home / "tiny.gguf")
    done = run_cli("convert", str(file), f"{home}/Tiny-bf16", **variables(home))
    assert done.returncode == 0, done.stderr
    source = home / "Tiny-bf16"
    assert done.stdout.startswith(f"wrote {source} (")
    assert done.stderr.splitlines()[0].startswith("reading tiny.gguf")
    assert done.stderr.splitlines()[-1] == f"hint: serve it with `mlxsup add {source}`"
    check_plain(done.stdout + done.stderr)

    before = {path.name: path.read_bytes() for path in source.iterdir()}
    done = run_cli("convert", str(source), "--bits", "8", "--json", **variables(home))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert problems(done.stdout, ["convert"]) == []
    value = json.loads(done.stdout)
    target = home / ".mlxsup/models/tiny"
    assert value["path"] == str(target)
    assert json.loads((target / "config.json").read_text())["quantization"]["bits"] == 8
    assert value["size_bytes"] < len(before["model.safetensors"])
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert [path.name for path in target.parent.iterdir()] == ["tiny"]
    shown = json.loads(run_cli("show", "tiny", "--json", **variables(home)).stdout)
    assert (shown["problem"], shown["quantization"][:5]) == (None, "8 bit")
    with Piped("start", "--model", str(target), **variables(home)) as started:
        while "LOADING → READY" not in started.line():
            pass
        assert started.interrupt()[0] == 0


BEGUN = "os.mkdir(sys.argv[2].replace('new', f'.new.{os.getpid()}.partial'))"
SAYS = "print('reading'); print('error: it is bad', file=sys.stderr, flush=True)"


@pytest.mark.parametrize(
    ("does", "error", "hint"),
    [
        (f"{SAYS}; os._exit(65)", "it is bad", "`mlxsup show {source}` describes it"),
        (f"{SAYS}; os._exit(75)", "it is bad", "unload models or quit other programs"),
        (f"{SAYS}; os._exit(1)", "it is bad", "choose a writable folder"),
        (
            "os.kill(os.getpid(), signal.SIGSEGV)",
            "{source} is damaged or malicious: reading it crashed with SIGSEGV",
            "`mlxsup show {source}` describes it",
        ),
        (
            f"{BEGUN}; os.kill(os.getpid(), signal.SIGKILL)",
            "the conversion ended with signal 9",
            "it may have run out of memory",
        ),
        (
            "os.write(2, b'Traceback\\nKeyError: x\\n'); os._exit(1)",
            "the conversion ended with exit code 1: KeyError: x",
            "",
        ),
    ],
    ids=["a bad model", "no memory", "no place", "a crash", "killed", "a bug"],
)
def test_failure_of_a_conversion_says_why_and_what_to_do(
    home: Path, does: str, error: str, hint: str
) -> None:
    source = write_folder(home / "m")
    done = run_cli("convert", str(source), f"{home}/new", **played(home, does))
    assert (done.returncode, done.stdout) == (1, "")
    said = done.stderr.removeprefix("reading\n")
    assert said.startswith(f"error: {error.format(source=source)}\n")
    assert hint.format(source=source) in said
    assert [path.name for path in home.iterdir() if "new" in path.name] == []


def test_damaged_gguf_file_is_to_be_downloaded_again(home: Path) -> None:
    (home / "m.gguf").write_bytes(b"GGUF")
    variables = played(home, f"{SAYS}; os._exit(65)")
    done = run_cli("convert", f"{home}/m.gguf", **variables)
    assert done.stderr.endswith(
        "\nhint: download the file again if it may be incomplete; otherwise use the original"
        " repository: `mlxsup pull OWNER/NAME`\n"
    )
    done = run_cli("convert", f"{home}/m.gguf", "--quantize", **variables)
    assert (done.returncode, "remove --quantize and --bits" in done.stderr) == (64, True)


@pytest.mark.parametrize("source", ["a/Tiny", "entry", "other"])
def test_repository_of_the_cache_is_read_where_it_is(home: Path, source: str) -> None:
    snapshot = write_repository(home / "hub", "a/Tiny")
    (home / ".mlxsup").mkdir()
    entry = '[models.entry]\nrepo = "a/Tiny"\naliases = ["other"]\n'
    (home / ".mlxsup/config.toml").write_text(entry)
    does = "print(*sys.argv[1:]); print(sorted(os.environ), flush=True); os._exit(9)"
    done = run_cli("convert", source, "--quantize", **played(home, does) | {"HF_TOKEN": "secret"})
    arguments, names, *_ = done.stderr.splitlines()
    name = "tiny" if source == "a/Tiny" else source
    assert arguments == f"{snapshot} {home}/.mlxsup/models/{name} 4"
    assert "'HF_HUB_OFFLINE'" in names
    assert "HF_TOKEN" not in names


def test_target_that_exists_is_left_as_it_is(home: Path) -> None:
    source = write_folder(home / "m")
    (home / "new").mkdir()
    done = run_cli("convert", str(source), f"{home}/new", "--quantize", **variables(home))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{home}/new already exists; nothing was changed" in done.stderr
    assert f"choose another folder: `mlxsup convert {source} TARGET --quantize`" in done.stderr
    assert list((home / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a/missing", "a/missing is not in the Hugging Face cache"),
        ("{home}/missing.gguf", "{home}/missing.gguf does not exist"),
        ("{home}/parent", "{home}/parent is not a model folder, but contains some: m"),
    ],
)
def test_source_that_is_no_model_is_named_for_what_it_is(
    home: Path, source: str, message: str
) -> None:
    write_folder(home / "parent" / "m")
    done = run_cli("convert", source.format(home=home), "--json", **variables(home))
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "model_folder"
    assert error["message"].startswith(message.format(home=home))


def test_ctrl_c_ends_the_child(home: Path) -> None:
    source = write_folder(home / "m")
    does = "print(os.getpid(), flush=True); time.sleep(600)"
    with Piped("convert", str(source), f"{home}/new", **played(home, does)) as converting:
        child = int(converting.note())
        code, out, _ = converting.interrupt()
    assert (code, out) == (130, "")
    eventually(lambda: not psutil.pid_exists(child))
