"""What the files of a model folder say before mlx-lm is asked, kept answers, and bad files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.estimate import (
    MAX_BYTES,
    MAX_KEPT,
    ModelMemory,
    estimates_folder,
    find_kept,
    keep,
)
from mlxsup.protocol.tasks import Task
from mlxsup.store.model_folder import FolderProblem
from mlxsup.supervisor.memory import folder as folder_module
from mlxsup.supervisor.memory.estimates import Estimates
from mlxsup.supervisor.memory.folder import (
    UNASKED,
    Estimate,
    Stamp,
    difference,
    fingerprint,
    read_folder,
    stamp,
)
from mlxsup.supervisor.memory.folder_reader import Look, Place
from mlxsup.supervisor.memory.needs import estimate_folders

from support.daemon.estimates_here import estimates_here
from support.models.safetensors_files import (
    Arrays,
    llama_arrays,
    llama_config,
    write_folder,
    write_weights,
)

__all__ = ["estimates_here"]


SAID = ModelMemory(
    weight_bytes=7, layers=(CacheLayers(layers=2, token_bytes=3, row_bytes=4, window=5),)
)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, estimates_here: None) -> Path:
    """The folder of kept answers, of this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return estimates_folder()


def estimate(folder: Path, adapters: Sequence[str] = ()) -> Estimate:
    found = read_folder(folder, adapters)
    assert isinstance(found, Estimate), found
    return found


@pytest.mark.parametrize("shards", [1, 2])
def test_weights_are_as_large_as_the_files_that_a_load_reads(
    tmp_path: Path, kept: Path, shards: int
) -> None:
    """A head for drafts is none of them."""
    arrays = llama_arrays()
    write_folder(tmp_path, llama_config(), arrays, *[{"x": ("BF16", (5,))}] * (shards - 1))
    sizes = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    write_weights(tmp_path / "model-mtp.safetensors", arrays)
    found = estimate(tmp_path)
    assert (found.weight_bytes, found.layers, found.remark) == (sum(sizes), (), UNASKED)


@pytest.mark.parametrize(("most", "tokens"), [(512, 512), (9000, 8192), (None, 8192)])
def test_a_model_that_pools_reads_no_more_than_both_files_say(
    tmp_path: Path, kept: Path, most: int | None, tokens: int
) -> None:
    config = {"model_type": "gemma3", "hidden_size": 1, "text_config": llama_config()}
    write_folder(tmp_path, config, llama_arrays())
    plain = estimate(tmp_path)
    assert (plain.context_length, plain.task) == (8192, Task.GENERATE)
    (tmp_path / "modules.json").write_text('[{"type": "Pooling", "path": "1_Pooling"}]')
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": most}))
    pooled = estimate(tmp_path)
    assert (pooled.context_length, pooled.task) == (tokens, Task.EMBED)
    assert pooled.key != plain.key


# ---------------------------------------------------------------- kept answers


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/mlxsup/estimates"),
        ({"XDG_CACHE_HOME": ""}, "~/.cache/mlxsup/estimates"),
        ({}, "~/.cache/mlxsup/estimates"),
    ],
)
def test_answers_are_kept_in_the_users_cache(environment: dict[str, str], expected: str) -> None:
    assert estimates_folder(environment) == Path(expected).expanduser()


def test_mlx_lm_is_asked_unless_an_answer_is_kept(tmp_path: Path, kept: Path) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    asked: list[int] = []
    paths = [str(tmp_path / "m"), str(tmp_path / "gone")]
    first = estimate_folders(dict.fromkeys(paths, ()), asked.append)
    assert asked == [1]
    found = first[paths[0]]
    assert isinstance(found, Estimate)
    assert (found.layers, found.remark) == ((CacheLayers(layers=2, token_bytes=128),), "")
    assert isinstance(first[paths[1]], FolderProblem)
    keep(found.key, SAID, kept)
    known = estimate_folders(dict.fromkeys(paths, ()), asked.append)[paths[0]]
    assert known == replace(found, weight_bytes=7, layers=SAID.layers)
    assert asked == [1]


def test_an_answer_is_kept_for_the_same_content_and_versions_alone(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "m", llama_config(), llama_arrays())
    write_folder(tmp_path / "copy", llama_config(), llama_arrays())
    found = [estimate(tmp_path / "m").key]
    assert estimate(tmp_path / "copy").key == found[0]
    write_folder(tmp_path / "m", llama_config(head_dim=8), llama_arrays())
    found.append(estimate(tmp_path / "m").key)
    write_folder(tmp_path / "m", llama_config(head_dim=8), llama_arrays(dtype="F32"))
    found.append(estimate(tmp_path / "m").key)
    (tmp_path / "m" / "hf_quant_config.json").write_text("{}")
    found.append(estimate(tmp_path / "m").key)
    monkeypatch.setattr(folder_module, "_engine_versions", lambda: ["mlx_lm-9.dist-info"])
    found.append(estimate(tmp_path / "m").key)
    assert len(set(found)) == 5


DAMAGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "of another model": lambda value: value | {"key": "other"},
    "no object": lambda value: [],
    "a negative size": lambda value: value | {"memory": {"weight_bytes": -1, "layers": []}},
    "a size that no model has": lambda value: (
        value | {"memory": {"weight_bytes": MAX_BYTES + 1, "layers": []}}
    ),
    "layers of no model": lambda value: (
        value | {"memory": {"weight_bytes": 1, "layers": [{"layers": 2, "token_bytes": 2**30}]}}
    ),
}


def test_the_versions_are_those_that_are_installed() -> None:
    names = [version.partition("-")[0] for version in folder_module._engine_versions()]
    assert sorted(set(names)) == ["mlx", "mlx_lm"]


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_answer_is_none(kept: Path, what: str) -> None:
    keep("k", SAID, kept)
    assert find_kept("k", kept) == SAID
    file = kept / "k.json"
    file.write_text(json.dumps(DAMAGED[what](json.loads(file.read_text()))))
    assert find_kept("k", kept) is None
    file.unlink()
    os.mkfifo(file)
    assert find_kept("k", kept) is None, "it is not waited for"


def test_the_newest_answers_are_kept_and_a_full_disk_is_no_error(kept: Path) -> None:
    kept.mkdir(parents=True)
    for number in range(MAX_KEPT):
        path = kept / f"{number}.json"
        path.write_text("")
        os.utime(path, ns=(number, number))
    keep("k", SAID, kept)
    assert find_kept("k", kept) == SAID
    assert {path.name for path in kept.iterdir()} == {
        "k.json", *(f"{number}.json" for number in range(1, MAX_KEPT)),
    }  # fmt: skip
    keep("k", SAID, kept / "k.json")  # no folder
    assert find_kept("k", kept) == SAID


def test_fingerprint_follows_name_size_and_time_of_each_model_file(tmp_path: Path) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    path = tmp_path / "model.safetensors"

    def seen() -> str:
        os.utime(path, ns=(1, 1))
        os.utime(tmp_path / "config.json", ns=(1, 1))
        return fingerprint(stamp(tmp_path))

    found = [fingerprint(stamp(tmp_path)), seen()]
    os.truncate(path, path.stat().st_size + 1)
    found.append(seen())
    path = path.rename(tmp_path / "model-1.safetensors")
    found.append(seen())
    (tmp_path / "config.json").write_text("{}")
    found.append(seen())
    assert len(set(found)) == 5
    (tmp_path / "notes.txt").touch()
    assert seen() == found[-1]


@pytest.mark.parametrize(
    ("present", "says"),
    [
        ({"a": (1, 1)}, ""),
        ({}, "a was removed since it was loaded"),
        ({"a": (1, 1), "b": (1, 1)}, "b was added since it was loaded"),
        ({"a": (2, 1)}, "a has changed since it was loaded"),
        ({"a": (1, 2)}, "a has changed since it was loaded"),
    ],
)
def test_what_has_changed_since_a_load_is_named(present: Stamp, says: str) -> None:
    assert difference({"a": (1, 1)}, present) == says


def test_places_that_no_model_has_are_forgotten() -> None:
    estimates, places = Estimates(), [Place("/one"), Place("/two")]
    for place in places:
        estimates.know(place, Look(path=place.path))
    estimates.keep(places[:1])
    assert [estimates.of(place) for place in places] == [Look(path="/one"), None]


# ---------------------------------------------------------------- wrong files


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "is not JSON: "),
        ("config.json", "[" * 10**5, "is not JSON: "),
        ("config.json", "[]", "does not hold a JSON object"),
        (INDEX, "{}", "is no list of weight files in JSON"),
        (INDEX, "[" * 10**5, "is no list of weight files in JSON"),
    ],
)
def test_a_file_that_is_none_is_named(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    write_folder(tmp_path, llama_config(), llama_arrays())
    (tmp_path / name).write_text(content)
    found = read_folder(tmp_path)
    assert isinstance(found, FolderProblem)
    assert found.text.startswith(f"{tmp_path / name} {message}")


def test_an_estimate_with_another_adapter_has_another_fingerprint(tmp_path: Path) -> None:
    """What was measured with the one does not count for the other."""
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write_weights(tmp_path / name / "adapters.safetensors", {"q.lora_a": ("F32", (2, 4))})
    choices = [[], [str(tmp_path / "one")], [str(tmp_path / "two")]]
    found = {estimate(tmp_path / "model", adapters).fingerprint for adapters in choices}
    assert len(found) == 3


def test_adapters_take_as_much_for_each_and_for_none_as_the_largest(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", llama_config(), llama_arrays())
    for name, rank in {"small": 2, "large": 5}.items():
        (tmp_path / name).mkdir()
        halves: Arrays = {"q.lora_a": ("F32", (rank, 4)), "q.lora_b": ("F32", (4, rank))}
        write_weights(tmp_path / name / "adapters.safetensors", halves)
    adapters = [str(tmp_path / name) for name in ("small", "large", "missing")]
    large = (tmp_path / "large" / "adapters.safetensors").stat().st_size
    assert estimate(tmp_path / "model", adapters).adapter_bytes == 3 * large
