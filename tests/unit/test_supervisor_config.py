"""The configuration file: what is read, and that each mistake is named with its place."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.parameters import sampling_defaults
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.config.folders import config_of_folders, split_model
from mlxsup.supervisor.config.lines import LineIndex
from mlxsup.supervisor.config.load import ConfigError, load_config
from mlxsup.supervisor.config.sampling_table import SamplingTable
from mlxsup.supervisor.config.tables import (
    ModelTable,
    RestartTable,
    SupervisorTable,
)
from mlxsup.supervisor.core.settings import (
    ClientSettings,
    CoreSettings,
    ModelSettings,
    RestartSettings,
)

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


def write(folder: Path, text: str) -> Path:
    path = folder / "mlxsup.toml"
    path.write_text(text)
    return path


def problems_of(folder: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    assert caught.value.exit_code == 78
    return caught.value.problems


def test_a_small_file_takes_every_default_of_the_core(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, '[models.tiny]\npath = "m"\n'))
    assert config.core == CoreSettings()
    assert (config.log_level, config.log_format, config.prevent_sleep) == ("info", "text", "off")
    assert config.runtime_dir == Path("~/.mlxsup/run").expanduser()
    assert config.log_dir == Path("~/.mlxsup/logs").expanduser()
    launch = LaunchSettings(path=str(tmp_path / "m"))
    assert config.models == (ModelSettings(name=ModelName("tiny"), launch=launch),)


EVERY_KEY = """
[supervisor]
runtime_dir = "run"
log_dir = "~/logs"
max_queue = 7
max_queue_per_client = 3
max_queue_bytes = "2MiB"
memory_budget = "512MiB"
log_level = "debug"
log_format = "json"
prevent_sleep = "busy"
drain_timeout_s = "90s"
queue_timeout_s = "5m"
first_token_timeout_s = "1h"
aging_s = "2m"
min_run_s = 2.5
max_parallel_prefills = 3
parallel_loads = 2
[clients.alice]
weight = 3
priority = "normal"
max_priority = "normal"
max_queue = 9
max_running = 2
[clients."*"]
weight = 0.5
priority = "batch"
[models."a.b-c_1"]
path = "/models/x"
preload = false
max_concurrency = 2
idle_unload_s = "1.5m"
load_stall_timeout_s = 9
step_timeout_s = 8.5
decode_stall_target_ms = 77
context_length = 4096
deterministic = true
memory = "3GiB"
cache_limit = 1024
wired = "auto"
prefix_cache = "1GiB"
sampling.temperature = 1
sampling.top_k = 40
restart.max_restarts = 1
restart.window_s = 2
restart.stable_s = 3
restart.backoff_initial_s = 4
restart.backoff_max_s = "5s"
"""


def test_every_key_reaches_its_setting(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, EVERY_KEY))
    assert config.core == CoreSettings(
        max_queue=7,
        max_queue_per_client=3,
        max_queue_bytes=2 * 1024 * 1024,
        drain_timeout_s=90.0,
        queue_timeout_s=300.0,
        first_token_timeout_s=3600.0,
        aging_s=120.0,
        min_run_s=2.5,
        clients={
            "alice": ClientSettings(
                weight=3.0, max_priority=Priority.NORMAL, max_queue=9, max_running=2
            ),
            "*": ClientSettings(weight=0.5, priority=Priority.BATCH),
        },
        max_parallel_prefills=3,
        parallel_loads=2,
    )
    assert (config.runtime_dir, config.log_level) == (tmp_path / "run", "debug")
    assert config.prevent_sleep == "busy"
    assert config.memory_budget == 512 * 1024 * 1024
    assert config.log_dir == Path("~/logs").expanduser()
    assert config.models == (
        ModelSettings(
            name=ModelName("a.b-c_1"),
            launch=LaunchSettings(
                path="/models/x",
                max_concurrency=2,
                step_timeout_s=8.5,
                decode_stall_target_ms=77,
                context_length=4096,
                deterministic=True,
                memory_limit_bytes=3 * 2**30,
                cache_limit_bytes=1024,
                wired_limit_bytes=None,
                prefix_cache_bytes=2**30,
                sampling=sampling_defaults() | {"temperature": 1.0, "top_k": 40},
            ),
            preload=False,
            idle_unload_s=90.0,
            load_stall_timeout_s=9.0,
            restart=RestartSettings(
                max_restarts=1,
                window_s=2.0,
                stable_s=3.0,
                backoff_initial_s=4.0,
                backoff_max_s=5.0,
            ),
        ),
    )


def test_defaults_fill_what_an_entry_leaves_out(tmp_path: Path) -> None:
    config = load_config(
        write(
            tmp_path,
            """
            [defaults]
            path = "shared"
            preload = false
            restart = { max_restarts = 3, window_s = 60 }
            sampling = { temperature = 0.7, top_k = 9 }
            [models.a]
            [models.b]
            path = "own"
            preload = true
            [models.b.restart]
            window_s = "2m"
            [models.b.sampling]
            top_k = 3
            """,
        )
    )
    a, b = config.models
    assert (a.launch.path, a.preload) == (str(tmp_path / "shared"), False)
    assert (b.launch.path, b.preload) == (str(tmp_path / "own"), True)
    assert (a.restart.max_restarts, a.restart.window_s) == (3, 60.0)
    assert (b.restart.max_restarts, b.restart.window_s) == (3, 120.0)
    assert (a.launch.sampling["temperature"], a.launch.sampling["top_k"]) == (0.7, 9)
    assert (b.launch.sampling["temperature"], b.launch.sampling["top_k"]) == (0.7, 3)


def test_the_fake_engine_needs_no_path_and_takes_options(tmp_path: Path) -> None:
    text = '[models.f]\nengine = "fake"\nfake = { step_s = 0.1, deep = { a = [1] } }\n'
    (model,) = load_config(write(tmp_path, text)).models
    assert model.launch.engine == "fake"
    assert model.launch.fake == {"step_s": 0.1, "deep": {"a": [1]}}


def test_all_mistakes_of_a_file_are_reported_at_once_in_its_order(tmp_path: Path) -> None:
    text = """\
[supervisor]
max_queue = "many"
[defaults]
preload = 3
[models.a]
patj = "m"
note = '''
[models.hidden]
max_queue = 1
'''
[models.b]
path = "m"
restart = { max_restart = 2, window_s = -1 }
"""
    lines = [int(p.split(":")[1]) for p in problems_of(tmp_path, text)]
    assert lines == [2, 4, 5, 6, 7, 13, 13]


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("max_concurrency = 0\n", ["max_concurrency takes", "m names neither"]),
        ("restart = { window_s = 0 }\n", ["m names neither", "restart.window_s takes"]),
        (
            "max_concurrency = 0\nrestart = { backoff_max_s = 0.5 }\n",
            ["max_concurrency takes", "m names neither", "restart.backoff_max_s takes at least"],
        ),
        # What depends on a wrong value is not judged.
        ("path = 3\n", ["path takes a folder"]),
        ('engine = "vllm"\nfake = { a = 1 }\n', ["engine takes"]),
        (
            'path = "m"\nrestart = { backoff_initial_s = 100, backoff_max_s = "x" }\n',
            ["restart.backoff_max_s takes seconds"],
        ),
    ],
)
@pytest.mark.parametrize("is_default", [False, True])
def test_a_wrong_key_hides_no_other_mistake_and_makes_none(
    tmp_path: Path, table: str, keys: list[str], is_default: bool
) -> None:
    text = f"[defaults]\n{table}[models.m]\n" if is_default else f"[models.m]\n{table}"
    told = [problem.split(": ", 1)[1] for problem in problems_of(tmp_path, text)]
    assert len(told) == len(keys)
    for key in keys:
        assert any(f".{key}" in problem for problem in told), told


def test_defaults_that_are_no_table_hide_no_mistake_of_a_model(tmp_path: Path) -> None:
    told = problems_of(tmp_path, 'defaults = 3\n[models.m]\npath = "m"\npreload = 3\n')
    assert [int(problem.split(":")[1]) for problem in told] == [1, 4]


def test_a_missing_model_folder_is_no_mistake_of_the_file(tmp_path: Path) -> None:
    (model,) = load_config(write(tmp_path, '[models.m]\npath = "nowhere"\n')).models
    assert not Path(model.launch.path).exists()


@pytest.mark.parametrize("content", [None, b"\xff\xfe[models]"])
def test_a_file_that_cannot_be_read_is_one_problem(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mlxsup.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{path}: ")


def test_the_line_index_is_not_misled_by_quotes_brackets_and_comments() -> None:
    index = LineIndex(
        'a = "# [x]"  # b = 1\n'
        "list = [\n"
        '  "c = 1", # ]\n'
        "]\n"
        "[t.'quoted key'.u]  # comment\n"
        'd."e.f" = { g = 1, h.i = "}" }\n'
        'text = """\n'
        "j = 1\n"
        '""" # the end\n'
        "k = 1\n"
    )
    at = ("t", "quoted key", "u")
    assert index.find(("a",)) == 1
    assert index.find(("list",)) == 2
    assert index.find(at) == 5
    assert index.find((*at, "d", "e.f")) == 6
    assert index.find((*at, "d", "e.f", "h", "i")) == 6
    assert index.find((*at, "text")) == 7
    assert index.find((*at, "k")) == 10
    assert index.find(("c",)) == 1
    assert index.find((*at, "j")) == 5


# ---------------------------------------------------------------- the example file


def _defaults_of(table: type[BaseModel]) -> dict[str, Any]:
    return table().model_dump(exclude={"restart", "sampling"})


def _example() -> dict[str, Any]:
    return tomllib.loads(EXAMPLE.read_text())


def test_the_example_names_every_key_with_its_default() -> None:
    values = _example()
    model = dict(values["models"]["smollm2"])
    restart, sampling = model.pop("restart"), model.pop("sampling")
    for given, table in (
        (values["supervisor"], SupervisorTable),
        (model, ModelTable),
        (restart, RestartTable),
        (sampling, SamplingTable),
    ):
        defaults = _defaults_of(table)
        # The one key that cannot stand next to another is in a comment.
        assert set(given) | ({"repo"} if table is ModelTable else set()) == set(defaults)
        checked = table.model_validate(given).model_dump(exclude={"restart", "sampling"})
        checked.pop("path", None)
        defaults.pop("path", None)
        assert checked == defaults


def test_the_example_has_two_models_and_a_comment_for_each_key() -> None:
    assert [m.name for m in load_config(EXAMPLE).models] == ["smollm2", "smollm2-copy"]
    for line in EXAMPLE.read_text().splitlines()[:-1]:
        if re.match(r"\w+ = ", line):
            assert re.search(r"\s# \S", line), f"no comment: {line}"


# ---------------------------------------------------------------- without a file


def test_folders_amount_to_a_configuration_that_can_be_kept(tmp_path: Path) -> None:
    folders = {"a": tmp_path / "a", "b.c": tmp_path / 'with "quotes"\tand é'}
    config, text = config_of_folders(folders)
    assert [str(m.name) for m in config.models] == ["a", "b.c"]
    assert [Path(m.launch.path) for m in config.models] == list(folders.values())
    assert config.config_path is None
    assert load_config(write(tmp_path, text)).models == config.models


def test_a_folder_gives_its_name_unless_one_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert split_model("models/smollm2/") == ("smollm2", tmp_path / "models" / "smollm2")
    assert split_model("small=./models/smollm2") == ("small", tmp_path / "models" / "smollm2")
    assert split_model("./a=b") == ("a=b", tmp_path / "a=b")
    assert split_model(".")[0] == tmp_path.name
    with pytest.raises(ConfigError, match="a model's name takes"):
        config_of_folders({"a=b": tmp_path / "a=b"})


def test_models_wire_nothing_unless_each_is_asked_to_I3(tmp_path: Path) -> None:
    """So the sum of what they wire is within the machine's; `auto` and sizes are a user's to add up
    (docs/known-limits.md)."""
    names = [f"m{number}" for number in range(8)]
    tables = "".join(f'[models.{name}]\npath = "/x"\n' for name in names)
    config = load_config(write(tmp_path, tables))
    assert [model.launch.wired_limit_bytes for model in config.models] == [0] * 8
    config = load_config(write(tmp_path, tables + 'wired = "1GiB"\n'))
    assert [model.launch.wired_limit_bytes for model in config.models] == [0] * 7 + [2**30]
