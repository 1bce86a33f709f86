"""The configuration file: what each key becomes, and the sentence about each mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxsup.cli.schema_file import schema_text
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.protocol.parameters import sampling_defaults
from mlxsup.protocol.places import MAX_KEY_PARTS, UnreadableConfigError, read_toml
from mlxsup.protocol.states import Priority
from mlxsup.supervisor.config import check as check_module
from mlxsup.supervisor.config.folders import config_of_folders, split_model
from mlxsup.supervisor.config.lines import LineIndex
from mlxsup.supervisor.config.load import MAX_DEPTH, ConfigError, load_config
from mlxsup.supervisor.config.schema import config_schema
from mlxsup.supervisor.config.values import (
    check_duration,
    check_size_auto_or_off,
    check_size_or_auto,
    parse_size,
    size_or_auto,
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


def problems_of(path: Path) -> list[str]:
    """What is wrong with a file."""
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.exit_code == 78
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


# Each row: a file, and the line and the sentence of each problem in it.
MISTAKES: list[list[str]] = json.loads(
    (Path(__file__).parent / "golden_config_mistakes.json").read_text()
)


@pytest.mark.parametrize("row", MISTAKES, ids=lambda row: row[1][:60])
def test_load_config_names_line_key_and_expectation_of_each_mistake(
    tmp_path: Path, row: list[str]
) -> None:
    text, *expected = row
    path = write(tmp_path, text)
    assert problems_of(path) == [f"{path}:{problem}" for problem in expected]


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


M = '[models.m]\npath = "m"\n'


def test_load_config_takes_values_at_the_limits(tmp_path: Path) -> None:
    name = "A" + 63 * "."
    (tmp_path / "mlxsup.toml").write_text(
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
[models."{name}"]
engine = "fake"
fake = {{ a = [1, "x", true, 1.5, {{ b = [] }}], deep = {{}} }}
max_concurrency = 1024
idle_unload_s = 0
context_length = {2**63 - 1}
decode_stall_target_ms = 1
memory = 0
wired = 0
restart = {{ max_restarts = 0, stable_s = 0, backoff_initial_s = 2, backoff_max_s = 2 }}
sampling = {{ temperature = 0, top_p = 1, min_p = 0, top_k = 0 }}
[models.mlxsup2]
engine = "fake"
path = ""
""".replace('path = ""\n', 'path = "../b/../c"\n')
    )
    config = load_config(tmp_path / "mlxsup.toml")
    core = config.core
    assert (core.max_queue, core.max_queue_per_client, core.max_queue_bytes) == (1, 1, 1)
    assert (core.drain_timeout_s, core.queue_timeout_s, core.first_token_timeout_s) == (0, 0, 0)
    assert (core.max_parallel_prefills, core.parallel_loads) == (1, 1)
    first, second = config.models
    launch = first.launch
    assert (first.name, launch.path, launch.max_concurrency) == (name, "", 1024)
    assert launch.fake == {"a": [1, "x", True, 1.5, {"b": []}], "deep": {}}
    assert (launch.context_length, launch.decode_stall_target_ms) == (2**63 - 1, 1)
    assert (launch.memory_limit_bytes, launch.wired_limit_bytes) == (0, 0)
    restart = first.restart
    assert (restart.max_restarts, restart.stable_s, restart.backoff_max_s) == (0, 0.0, 2.0)
    assert second.launch.path == str(tmp_path.parent / "c")


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_an_integer_of_more_than_64_bits_is_a_mistake_and_no_crash_P20(
    tmp_path: Path, digits: int
) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(f"{M}sampling.temperature = {'9' * digits}\nfake.a = [-{'9' * digits}]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    if digits == 5000:  # more than Python reads
        assert caught.value.problems == [f"{path}: contains an integer of more than 64 bits"]
    else:
        assert caught.value.problems == [
            f"{path}:3: models.m.sampling.temperature cannot take an integer of more than 64 bits",
            f"{path}:4: models.m.fake.a cannot take an integer of more than 64 bits",
        ]


@pytest.mark.parametrize("number", [-(2**63) - 1, 2**63])
def test_64_bits_are_the_border(tmp_path: Path, number: int) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(f'[models.m]\nengine = "fake"\nfake.a = {number}\n')
    with pytest.raises(ConfigError, match=r":3: models\.m\.fake\.a cannot take an integer"):
        load_config(path)
    within = number + 1 if number < 0 else number - 1
    path.write_text(f'[models.m]\nengine = "fake"\nfake.a = {within}\n')
    assert load_config(path).models[0].launch.fake == {"a": within}


def test_the_home_of_a_user_that_does_not_exist_is_no_crash_P20(tmp_path: Path) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text('[models.m]\npath = "~no-such-user/m"\n')
    assert load_config(path).models[0].launch.path == str(tmp_path / "~no-such-user" / "m")


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
        f"{path}:3: supervisor.runtime_dir takes a shorter folder: the socket path {socket}"
        " has 104 bytes; at most 103 work on every system"
    ]
    monkeypatch.setenv("HOME", f"{longest}/home")
    path.write_text(M)
    with pytest.raises(ConfigError, match=r":1: supervisor\.runtime_dir takes a shorter folder"):
        load_config(path, has_sockets=True)
    # Whoever does not need the folder's sockets can read the file.
    assert load_config(path).runtime_dir == Path(f"{longest}/home/.mlxsup/run")


DOTS = ".".join(["deep"] * 3000)


def refusal(path: Path, text: str) -> str:
    """Return the one problem of a file with this text."""
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    return problem


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
    path = tmp_path / "deep.toml"
    said = f"line {line} has a key of more than {MAX_KEY_PARTS} parts"
    assert refusal(path, text) == f"{path}: {said}"
    with pytest.raises(UnreadableConfigError, match=said):
        read_toml(path)


def test_texts_may_have_any_number_of_dots(tmp_path: Path) -> None:
    text = (
        '[models.m]\nengine = "fake"\n[models.m.presets.p]\nchat_template_kwargs = { x = "'
        + "a.b... " * 50
        + '" }\n'
    )
    (tmp_path / "dots.toml").write_text(text)
    assert load_config(tmp_path / "dots.toml").models[0].name == "m"


def test_a_file_nested_as_deeply_as_allowed_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    too_deep = f"{path}: is nested too deeply to be a configuration"
    assert refusal(path, "x = " + "[" * 100_000) == too_deep
    for depth, is_read in ((MAX_DEPTH - 4, True), (MAX_DEPTH - 3, False)):  # models, m, fake, root
        text = f'[models.m]\nengine = "fake"\nfake.x = {"[" * depth}{"]" * depth}'
        if is_read:
            path.write_text(text)
            assert load_config(path).models[0].name == "m"
        else:
            assert refusal(path, text) == too_deep


GIB = 2**30


def test_a_budget_that_the_machine_does_not_have_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    def largest(given_bytes: int, backend: str) -> int:
        asked.append((given_bytes, backend))
        return 8 * GIB

    monkeypatch.setattr(check_module, "largest_budget_bytes", largest)
    monkeypatch.setattr(check_module, "find_backend", lambda: "cuda")
    path = tmp_path / "mlxsup.toml"
    path.write_text(f'{M}[supervisor]\nmemory_budget = "8GiB"\n')
    assert load_config(path).memory_budget == 8 * GIB
    path.write_text(f'{M}[supervisor]\nmemory_budget = "8.5 GiB"\n')
    assert problems_of(path) == [
        f"{path}:4: supervisor.memory_budget takes at most what this machine has (8.00 GiB),"
        " not 8.50 GiB"
    ]
    assert asked == [(8 * GIB, "cuda"), (17 * GIB // 2, "cuda")]
    # Whoever leaves it to mlxsup asks nobody.
    path.write_text(f'{M}[supervisor]\nmemory_budget = "auto"\n')
    assert load_config(path).memory_budget is None
    assert len(asked) == 2


def two(first: str, second: str = "") -> str:
    return f'[models.a]\npath = "a"\n{first}\n[models.b]\npath = "b"\n{second}\n'


def test_aliases_are_names_besides_that_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(two('aliases = ["gpt-4o", "org/Model_1.5"]'))
    models = load_config(path).models
    assert [model.aliases for model in models] == [("gpt-4o", "org/Model_1.5"), ()]


WARM = "[models.a.presets.warm]\ntemperature = 0.8\nchat_template_kwargs = { mood = 'good' }\n"


def test_a_preset_has_what_it_says_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"{two('')}{WARM}[models.a.presets.plain]\n")
    models = load_config(path).models
    assert models[0].presets == {
        "warm": {"temperature": 0.8, "chat_template_kwargs": {"mood": "good"}},
        "plain": {},
    }
    assert models[1].presets == {}


def test_presets_of_the_defaults_are_for_all_that_have_none(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f"[defaults.presets.cold]\ntemperature = 0\n{two('')}{WARM}")
    models = load_config(path).models
    assert [list(model.presets) for model in models] == [["warm"], ["cold"]]


def test_names_of_other_apis_are_kept_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    alias = 'aliases = ["al"]'
    names = '"gpt-*" = "al"\n"claude-*" = "a:warm"\n"a/b" = "b"\n'
    path.write_text(f"[gateway.names]\n{names}{two(alias)}{WARM}")
    assert load_config(path).gateway_rules.names == (
        ("gpt-*", "al"), ("claude-*", "a:warm"), ("a/b", "b"),
    )  # fmt: skip


def test_so_many_names_are_too_many(tmp_path: Path) -> None:
    names = "".join(f'"x{number}" = "a"\n' for number in range(65))
    path = tmp_path / "c.toml"
    path.write_text(f"[gateway.names]\n{names}{two('')}")
    (found,) = problems_of(path)
    assert found == f"{path}:1: gateway.names takes at most 64 names, not 65"


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (3, 3.0),
        (2.5, 2.5),
        (10**9, 1e9),
        ("250ms", 0.25),
        ("90s", 90.0),
        (" 1.5 m ", 90.0),
        ("2h", 7200.0),
        ("2d", 172_800.0),
        ("99999d", 1e9),
        ("9" * 400 + "d", 1e9),
    ],
)
def test_a_duration_is_a_number_of_seconds_or_has_a_unit(given: object, seconds: float) -> None:
    parsed = check_duration(given)
    assert parsed == pytest.approx(seconds, rel=1e-12)
    assert type(parsed) is float


@pytest.mark.parametrize(
    "given",
    [
        *(-1, -0.5, 10**9 + 1, 1e10, float("nan"), float("inf"), True, None, [1]),
        *("", "5", "s", "5 w", "-5s", "1.s", ".5s", "5S", "x5s", "5s x"),
    ],
)
def test_check_duration_refuses(given: object) -> None:
    expected = 'seconds as a number, or text such as "90s", "5m" or "1h"'
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        check_duration(given)


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        (0, 0),
        (7, 7),
        ("7B", 7),
        ("1.5KiB", 1536),
        (" 2 MiB ", 2 * 2**20),
        ("3GiB", 3 * 2**30),
        ("4TiB", 4 * 2**40),
        ("0.5B", 0),
        ("8388607TiB", 8388607 * 2**40),
    ],
)
def test_a_size_is_a_number_of_bytes_or_has_a_unit(given: object, size_bytes: int) -> None:
    parsed = parse_size(given)
    assert parsed == size_bytes
    assert type(parsed) is int
    for check in (check_size_or_auto, check_size_auto_or_off):
        assert check(given) == given


@pytest.mark.parametrize(
    "given",
    [
        *(-1, 1.0, True, False, None, "", "7", "MiB", "7MB", "-7B", "7 b", "1.KiB", "x7B", "7B x"),
        *("8388608TiB", "9" * 400 + "GiB"),
    ],
)
def test_parse_size_refuses(given: object) -> None:
    expected = 'bytes as an integer, or text such as "256MiB"'
    for check in (parse_size, check_size_or_auto, check_size_auto_or_off):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            check(given)


def test_auto_and_off_stand_for_sizes() -> None:
    assert check_size_or_auto("auto") == "auto"
    assert [check_size_auto_or_off(word) for word in ("auto", "off")] == ["auto", "off"]
    with pytest.raises(ValueError, match="bytes as an integer"):
        check_size_or_auto("off")
    given: list[int | str] = ["auto", "off", "2KiB", 5]
    assert [size_or_auto(one) for one in given] == [None, 0, 2048, 5]


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
    assert index.find(("one", 'h\\"i')) == 8
    assert index.find(()) == 1
    deep = LineIndex("\n[x.y.z]\na.b = 1\n")
    assert [deep.find(path) for path in (("x",), ("x", "y"), ("x", "y", "z", "a"))] == [2, 2, 3]


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


def test_folders_are_written_so_that_each_name_and_path_can_be_read_again(tmp_path: Path) -> None:
    odd = tmp_path / 'q"\\\t\x7fé📦'
    config, text = config_of_folders({"a": tmp_path, "b.c": odd})
    escaped = json.dumps(str(odd)).replace("\\ud83d\\udce6", "\\U0001F4E6")
    assert escaped.endswith('/q\\"\\\\\\t\\u007f\\u00e9\\U0001F4E6"')
    assert text == (f'[models.a]\npath = "{tmp_path}"\n\n[models."b.c"]\npath = {escaped}\n')
    assert [(model.name, model.launch.path) for model in config.models] == [
        ("a", str(tmp_path)),
        ("b.c", str(odd)),
    ]
    (tmp_path / "c.toml").write_text(text)
    assert load_config(tmp_path / "c.toml").models == config.models


def test_split_model_expands_a_home_and_survives_an_unknown_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert split_model("~/m") == ("m", Path("/home/me/m"))
    assert split_model("n=~/m") == ("n", Path("/home/me/m"))
    assert split_model("~no-such-user/m") == ("m", tmp_path / "~no-such-user" / "m")
    assert split_model("=m") == ("=m", tmp_path / "=m")


SCHEMA = EXAMPLE.parent / "cli" / "mlxsup.schema.json"


def test_the_schema_that_is_printed_is_that_of_the_code_and_the_example_names_it() -> None:
    # Made with: make reference
    text = json.dumps(config_schema(), indent=2, ensure_ascii=False)
    assert SCHEMA.read_text() == text + "\n"
    assert schema_text() == text
    first = EXAMPLE.read_text().splitlines()[0]
    assert first == "#:schema cli/mlxsup.schema.json"


@pytest.mark.parametrize("text", ["a" * 900_000, '"a" ' * 200_000, "a.b " * 200_000])
def test_a_long_line_without_a_key_is_read_in_linear_time(tmp_path: Path, text: str) -> None:
    assert "is not TOML" in refusal(tmp_path / "flat.toml", text)
