"""The configuration file: what each key becomes, and the sentence about each mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.configuration import schema_text
from mlxsup.protocol.discovery import MAX_KEY_PARTS, UnreadableConfigError, read_toml
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.config import check as check_module
from mlxsup.supervisor.config.lines import LineIndex
from mlxsup.supervisor.config.load import (
    MAX_DEPTH,
    MAX_MODELS,
    ConfigError,
    ConfigText,
    DaemonConfig,
    changed_for_later,
    load_config,
    parse_config,
)
from mlxsup.supervisor.config.values import parse_seconds, parse_size
from mlxsup.supervisor.core.settings import CoreSettings, ModelSettings

M = '[models.m]\npath = "m"\n'
GIB = 2**30


def config_of(text: str) -> DaemonConfig:
    """Return what a file with this text says; it is /some/c.toml, which does not exist."""
    return parse_config(ConfigText(raw=text, folder=Path("/some")), Path("/some/c.toml"))


def problems_of(text: str) -> list[str]:
    """Return what is wrong with such a file, without its name."""
    with pytest.raises(ConfigError) as caught:
        config_of(text)
    assert caught.value.exit_code == 78
    assert str(caught.value) == "\n".join(caught.value.problems)
    return [problem.removeprefix("/some/c.toml:") for problem in caught.value.problems]


# ---------------------------------------------------------------- mistakes

# The snapshot has a line for each problem of these files.
MISTAKES = {
    name: text
    for part in (Path(__file__).parent / "config_mistakes.txt").read_text().split("#### ")[1:]
    for name, _, text in [part.partition("\n")]
} | {
    "integers": f"""
[supervisor]
max_queue = 0
[models.m]
path = "m"
max_concurrency = {"9" * 400}
sampling.temperature = {2**63}
fake.a = [-{2**63 + 1}]
""",
    "an integer of 5000 digits": f"{M}max_concurrency = {'9' * 5000}\n",
    "a long host": f'[gateway]\nhosts = ["{"a" * 254}"]\n{M}',
    "many hosts": f"[gateway]\nhosts = {json.dumps(['a'] * 33)}\n{M}",
    "many models": "[models]\n" + "".join(f"m{n} = {{}}\n" for n in range(1001)),
    "many names": "[gateway.names]\n" + "".join(f"x{n} = 'm'\n" for n in range(65)) + M,
}


def test_each_mistake_is_named_with_its_line_its_key_and_what_is_allowed(
    snapshot: SnapshotAssertion,
) -> None:
    assert {name: problems_of(text) for name, text in MISTAKES.items()} == snapshot


@given(
    table=st.sampled_from(["supervisor", "clients.c", "models.n", "models.n.restart", "defaults"]),
    key=st.sampled_from(["max_queue", "weight", "aging_s", "memory", "window_s", "zzz", '"a b"']),
    before=st.lists(
        st.sampled_from(["# [x]", "", '[models.a]\npath = """\n[supervisor]\nzzz = 1\n"""', M]),
        unique=True,
    ),
)
def test_mistake_is_found_on_its_line(table: str, key: str, before: list[str]) -> None:
    head = "\n".join([*before, '[models.n]\nengine = "fake"' if table != "models.n" else ""])
    line = head.count("\n") + 3
    found = problems_of(f"{head}\n[{table}]\n{key} = [-1]\n[models.last]\nengine = 'fake'\n")
    wrong = [problem for problem in found if f"{table}.{key}" in problem]
    assert [problem.partition(":")[0] for problem in wrong] == [str(line)]


def test_a_file_that_cannot_be_read_names_itself_and_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "mlxsup.toml"
    problems = []
    for content in (None, b"a = 1\n\xff", b"x = " + b"[" * 100_000):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        problems += caught.value.problems
    assert problems == [
        f"{path}: cannot be read: No such file or directory",
        f"{path}: is not UTF-8 text (byte 6)",
        f"{path}: is nested too deeply to be a configuration",
    ]


DOTS = ".".join(["deep"] * 3000)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f'[models.m]\nengine = "fake"\n[models.m.fake.{DOTS}]\nend = 1', 3),
        (f'[models.m]\nengine = "fake"\nfake.{DOTS} = 1', 3),
        (f"{DOTS} = 1", 1),
        ("x = 1\ny = {" + " . ".join(['"a b"', "'c'", "d"] * 40) + " = 1}", 2),
        ("a." * MAX_KEY_PARTS + "b = 1", 1),
    ],
    ids=["a table", "a key of a table", "a key", "an inline table", "one part too many"],
)
def test_a_key_of_many_parts_is_refused_unread(tmp_path: Path, text: str, line: int) -> None:
    said = f"line {line} has a key of more than {MAX_KEY_PARTS} parts"
    assert problems_of(text) == [f" {said}"]
    path = tmp_path / "deep.toml"
    path.write_text(text)
    with pytest.raises(UnreadableConfigError, match=said):
        read_toml(path)


@pytest.mark.parametrize("text", ["a" * 900_000, '"a" ' * 200_000, "a.b " * 200_000])
def test_a_long_line_without_a_key_is_read_in_linear_time(text: str) -> None:
    assert "is not TOML" in problems_of(text)[0]


def test_a_file_nested_as_deeply_as_allowed_is_read() -> None:
    deepest = MAX_DEPTH - 4  # models, m, fake and the root
    text = '[models.m]\nengine = "fake"\nfake.x = '
    assert config_of(f"{text}{'[' * deepest}{']' * deepest}").models[0].name == "m"
    deeper = f"{text}{'[' * (deepest + 1)}{']' * (deepest + 1)}"
    assert problems_of(deeper) == [" is nested too deeply to be a configuration"]


def test_a_runtime_folder_too_long_for_sockets_is_a_mistake_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mlxsup.toml"
    longest = "/" + "x" * (103 - len("//w9999999.sock.beat"))
    path.write_text(f'[supervisor]\nruntime_dir = "{longest}"\n{M}')
    assert load_config(path, has_sockets=True).runtime_dir == Path(longest)
    path.write_text(f'[supervisor]\nmax_queue = 0\nruntime_dir = "{longest}x"\n{M}')
    with pytest.raises(ConfigError) as caught:
        load_config(path, has_sockets=True)
    socket = f"{longest}x/w9999999.sock.beat"
    assert caught.value.problems[1:] == [
        f"{path}:3: supervisor.runtime_dir cannot hold a socket: the socket path {socket}"
        " has 104 bytes; at most 103 work on every system"
    ]
    monkeypatch.setenv("HOME", f"{longest}/home")
    path.write_text(M)
    with pytest.raises(ConfigError, match=r":1: supervisor\.runtime_dir cannot hold a socket"):
        load_config(path, has_sockets=True)
    # A command that does not use the folder's sockets can read the file.
    assert load_config(path).runtime_dir == Path(f"{longest}/home/.mlxsup/run")


def test_a_budget_that_the_machine_does_not_have_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str]] = []

    def largest(given_bytes: int, backend: str) -> int:
        asked.append((given_bytes, backend))
        return 8 * GIB

    monkeypatch.setattr(check_module, "largest_budget_bytes", largest)
    monkeypatch.setattr(check_module, "find_backend", lambda: "cuda")
    assert config_of(f'{M}[supervisor]\nmemory_budget = "8GiB"\n').memory_budget == 8 * GIB
    assert problems_of(f'{M}[supervisor]\nmemory_budget = "8.5 GiB"\n') == [
        "4: supervisor.memory_budget must be at most what this machine has (8.00 GiB), not 8.50 GiB"
    ]
    assert asked == [(8 * GIB, "cuda"), (17 * GIB // 2, "cuda")]
    assert config_of(f'{M}[supervisor]\nmemory_budget = "auto"\n').memory_budget is None
    assert len(asked) == 2, "the machine is asked for given sizes only"


# ---------------------------------------------------------------- what keys become


def test_a_small_file_takes_every_default_of_the_core() -> None:
    config = config_of('[models.tiny]\npath = "m"\n')
    assert config.core == CoreSettings()
    assert (config.core.log_level, config.log_format, config.prevent_sleep) == (
        "info",
        "text",
        "off",
    )
    assert config.runtime_dir == Path("~/.mlxsup/run").expanduser()
    assert config.log_dir == Path("~/.mlxsup/logs").expanduser()
    assert config.gateway is None
    elsewhere = config_of(f'[supervisor]\nruntime_dir = "run"\n{M}')
    assert elsewhere.log_dir == Path("/some/run/logs")
    launch = LaunchSettings(path="/some/m")
    assert config.models == (ModelSettings(name=ModelName("tiny"), launch=launch),)
    assert launch.wired_limit_bytes == 0, "nothing is wired unless it is asked for (I3)"


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
warm_workers = 1
min_residency_s = 11
swap = false
swap_after_s = 12
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
aliases = ["gpt-4o", "org/Model_1.5"]
preload = false
pinned = true
max_concurrency = 2
idle_unload_s = "1.5m"
load_stall_timeout_s = 9
step_timeout_s = 8.5
decode_stall_target_ms = 77
decode_share = 0.25
context_length = 4096
deterministic = true
memory = "0.25GiB"
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
adapters = { sql = "adapters/sql", home = "~/adapters/home" }
drafts = "drafts/small"
parallel = "pipeline"
presets.warm = { temperature = 0.8, chat_template_kwargs = { mood = "good" } }
presets.plain = {}
[gateway]
listen = "[::1]:9"
[gateway.names]
"gpt-*" = "gpt-4o"
"claude-*" = "a.b-c_1:warm"
"sql-*" = "gpt-4o:sql"
"a/b" = "a.b-c_1"
"""


def test_every_key_reaches_its_setting(
    snapshot: SnapshotAssertion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert asdict(config_of(EVERY_KEY)) == snapshot


def test_keys_that_a_reload_leaves_for_the_next_start() -> None:
    small, every = config_of(M), config_of(EVERY_KEY)
    later = ("runtime_dir", "log_dir", "log_format", "prevent_sleep", "gateway")
    assert changed_for_later(small, every) == later
    assert changed_for_later(every, every) == ()
    plain, named = (config_of(f"[gateway]\n{names}{M}") for names in ("", "names = {x = 'm'}\n"))
    assert changed_for_later(plain, named) == ("gateway",)


def test_values_at_the_limits_are_taken() -> None:
    name = "A" + 63 * "."
    config = config_of(
        f"""\
[supervisor]
max_queue = 1
max_queue_per_client = 1
max_queue_bytes = 1
drain_timeout_s = 0
queue_timeout_s = 0
first_token_timeout_s = 0
max_parallel_prefills = 1
parallel_loads = 1
warm_workers = 16
[models."{name}"]
engine = "fake"
fake = {{ a = [1, "x", true, 1.5, {{ b = [{-(2**63)}] }}], deep = {{}} }}
max_concurrency = 1024
idle_unload_s = 0
context_length = {2**63 - 1}
decode_stall_target_ms = 1
decode_share = 0
memory = 0
wired = 0
restart = {{ max_restarts = 0, stable_s = 0, backoff_initial_s = 2, backoff_max_s = 2 }}
sampling = {{ temperature = 0, top_p = 1, min_p = 0, top_k = 0 }}
[models.mlxsup2]
engine = "fake"
path = "../b/../c"
hosts = [{{ address = "a" }}, {{ address = "b", ssh = "b" }}]
min_hosts = 2
decode_share = 0.95
wired = "off"
presets.p.chat_template_kwargs = {{ x = "{"a.b... " * 50}" }}
[models.home]
path = "~no-such-user/m"
wired = "1GiB"
"""
    )
    core = config.core
    assert (core.max_queue, core.max_queue_per_client, core.max_queue_bytes) == (1, 1, 1)
    assert (core.drain_timeout_s, core.queue_timeout_s, core.first_token_timeout_s) == (0, 0, 0)
    assert (core.max_parallel_prefills, core.parallel_loads, core.warm_workers) == (1, 1, 16)
    first, second, third = config.models
    launch = first.launch
    assert (first.name, launch.path, launch.max_concurrency) == (name, "", 1024)
    assert launch.fake == {"a": [1, "x", True, 1.5, {"b": [-(2**63)]}], "deep": {}}
    assert (launch.context_length, launch.decode_stall_target_ms) == (2**63 - 1, 1)
    assert (launch.memory_limit_bytes, launch.wired_limit_bytes) == (0, 0)
    restart = first.restart
    assert (restart.max_restarts, restart.stable_s, restart.backoff_max_s) == (0, 0.0, 2.0)
    assert second.launch.path == "/c"
    assert [one.launch.wired_limit_bytes for one in (second, third)] == [0, GIB]
    assert third.launch.path == "/some/~no-such-user/m"


def test_defaults_fill_what_an_entry_leaves_out() -> None:
    config = config_of(
        """
        [defaults]
        path = "shared"
        preload = false
        restart = { max_restarts = 3, window_s = 60 }
        sampling = { temperature = 0.7, top_k = 9 }
        presets.cold.temperature = 0
        [models.a]
        [models.b]
        path = "own"
        preload = true
        presets.warm.temperature = 1
        [models.b.restart]
        window_s = "2m"
        [models.b.sampling]
        top_k = 3
        """
    )
    a, b = config.models
    assert (a.launch.path, a.preload) == ("/some/shared", False)
    assert (b.launch.path, b.preload) == ("/some/own", True)
    assert (a.restart.max_restarts, a.restart.window_s) == (3, 60.0)
    assert (b.restart.max_restarts, b.restart.window_s) == (3, 120.0)
    assert (a.launch.sampling["temperature"], a.launch.sampling["top_k"]) == (0.7, 9)
    assert (b.launch.sampling["temperature"], b.launch.sampling["top_k"]) == (0.7, 3)
    assert (list(a.presets), list(b.presets)) == (["cold"], ["warm"])


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_seconds, "1.5m", 90.0),
        (parse_seconds, "99999d", 1e9),
        (parse_seconds, "9" * 400 + "d", 1e9),
        (parse_size, "7B", 7),
        (parse_size, "1.5KiB", 1536),
        (parse_size, " 2 MiB ", 2 * 2**20),
        (parse_size, "3GiB", 3 * 2**30),
        (parse_size, "0.5B", 0),
        (parse_size, "8388607TiB", 8388607 * 2**40),
    ],
)
def test_text_of_a_duration_or_a_size(
    parse: Callable[[str], float], text: str, value: float
) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "MiB",
        "7MB",
        "-7B",
        "7 b",
        "1.KiB",
        "x7B",
        "7B x",
        "8388608TiB",
        "9" * 400 + "GiB",
        "٣GiB",
    ],
)
def test_other_text_is_no_size(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_many_errors_are_counted() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("".join(f"k{number} = 1\n" for number in range(150)))
    *shown, last = caught.value.problems
    assert (len(shown), last) == (100, "and 50 more")


# ---------------------------------------------------------------- lines


def test_as_many_models_as_a_daemon_serves_are_taken() -> None:
    models = "".join(f'm{number} = {{ engine = "fake" }}\n' for number in range(MAX_MODELS))
    assert len(config_of(f"[models]\n{models}").models) == MAX_MODELS


def test_only_pinned_models_must_fit_together() -> None:
    budget = '[supervisor]\nmemory_budget = "1GiB"\n'
    model = '[models.{}]\nengine = "fake"\nmemory = "700MiB"\npinned = {}\n'
    assert (
        len(config_of(budget + model.format("a", "true") + model.format("b", "false")).models) == 2
    )
    (problem,) = problems_of(budget + model.format("a", "true") + model.format("b", "true"))
    assert problem.startswith("10: ")


def test_each_key_is_found_on_its_line_and_what_is_absent_at_the_table_around_it() -> None:
    index = LineIndex(
        "top = 1\n"
        "\n"
        "# a comment = 1\n"
        "  [ one ] # [two]\n"
        "a.b.c = 1\n"
        "a.b.d = 1\n"
        "'e.f'.g = 1\n"
        '"h\\"i" = 1\n'
        "[[many]]\n"
        "a = 1\n"
        "[one.two]\n"
        "a = { b = 1, 'c' = 2, \"d\" = 3, e.f = 4 }\n"
        "not a key\n"
        "a = { z = 1 }\n"
    )
    places = {
        "top": 1,
        "one": 4,
        "one a": 5,
        "one a b": 5,
        "one a b c": 5,
        "one a b d": 6,
        "one a b x y z": 5,
        "one e.f g": 7,
        "one x y": 4,
        "many": 9,
        "many a": 10,
        "one two": 11,
        "one two a": 14,  # the later one
        "one two a b": 12,
        "one two a c": 12,
        "one two a d": 12,
        "one two a e": 12,
        "one two a e f": 12,
        "one two a z": 14,
        "one two not": 11,
        "x": 1,
    }
    assert {path: index.find(tuple(path.split())) for path in places} == places
    assert index.find(("one", 'h"i')) == 8
    assert index.find(()) == 1
    deep = LineIndex("\n[x.y.z]\na.b = 1\n")
    assert [deep.find(path) for path in (("x",), ("x", "y"), ("x", "y", "z", "a"))] == [2, 2, 3]


def test_line_index_knows_keys_of_tables_within_values() -> None:
    index = LineIndex("#\u2028\na = {b = {c = 1},\nd = [{e = 1},\n{f.g = 2}], h = 3}\ni = 4\n")
    places = {"a": 2, "a b c": 2, "a d": 3, "a d e": 3, "a d f g": 4, "a h": 4, "i": 5}
    assert {path: index.find(tuple(path.split())) for path in places} == places


@pytest.mark.parametrize(
    "value",
    [
        '"""\nx = 1\n\\""" x = 1\n"""',
        "'''\nx = 1\n\"\"\" \\'''",
        "[\nx = 1\n]",
        "[[\nx = 1\n], # ]]\nx = 1\n]",
        "[ \"]\", ']', # ]\nx = 1\n]",
        '[ "\\"]", """]\n\\"""]\n""",\nx = 1\n]',
        "{ a = [\nx = 1\n] }",
        '"a # b" # "',
        "'\\' # '",
        '"""a""" # """',
        '"[" # [',
        "'{'",
        '""',
        '"\\\\" # [',
    ],
)
@pytest.mark.parametrize("equals", [" = ", "="])
def test_line_index_skips_the_inside_of_values(value: str, equals: str) -> None:
    index = LineIndex(f"\na{equals}{value}\nlast = 1\n")
    lines = value.count("\n") + 1
    assert index.find(("a",)) == 2
    assert index.find(("x",)) == 1, "there is no such key"
    assert index.find(("last",)) == lines + 2


def test_the_schema_that_is_printed_is_the_one_that_the_example_names() -> None:
    """tools/check_docs.py compares it with the tables."""
    example = Path(__file__).parents[2] / "config.example.toml"
    name = example.read_text().splitlines()[0].removeprefix("#:schema ")
    assert (example.parent / name).read_text() == schema_text() + "\n"
