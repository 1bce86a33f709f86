"""Each mistake of a configuration file is named in full: file, line, key, and what was expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import ConfigError, load_config

M = '[models.m]\npath = "m"\n'
SECONDS = 'seconds as a number, or text such as "90s", "5m" or "1h"'
BYTES = 'bytes as an integer, or text such as "256MiB"'
NAME = (
    "a model's name takes 1 to 64 of the characters A-Z a-z 0-9 . _ -, the first a letter or digit"
)
MODEL_KEYS = (
    "path, repo, revision, aliases, preload, pinned, max_concurrency, idle_unload_s,"
    " load_stall_timeout_s, step_timeout_s, decode_stall_target_ms, context_length, deterministic,"
    " memory, cache_limit, prefix_cache, wired, engine, fake, restart, sampling, presets"
)

TABLES = [
    ("[models.m]\n", 1, "models.m names neither a folder with path, nor a repo"),
    ("", 1, "names no model: add a table [models.NAME] with a path or a repo"),
    ("\n[models]\n", 2, "names no model: add a table [models.NAME] with a path or a repo"),
    ("models = 3\n", 1, "models takes a table for each model, not 3"),
    ("[models]\nm = 3\n", 2, "models.m takes a table, not 3"),
    (f"supervisor = 3\n{M}", 1, "supervisor takes a table, not 3"),
    (f"defaults = [1]\n{M}", 1, "defaults takes a table, not an array"),
    (f"{M}restart = []\n", 3, "models.m.restart takes a table, not an array"),
    (f"{M}sampling = 3\n", 3, "models.m.sampling takes a table, not 3"),
    (f"{M}fake = 3\n", 3, "models.m.fake takes a table of the fake engine's options, not 3"),
    (f"{M}fake = {{ a = 1 }}\n", 3, 'models.m.fake needs engine = "fake"'),
    (
        '[models.m]\nengine = "fake"\nfake = { at = 2026-01-01 }\n',
        3,
        "models.m.fake takes texts, numbers and tables",
    ),
    (
        '[models.m]\nengine = "fake"\nfake = { a = [1, { b = [2026-01-01] }] }\n',
        3,
        "models.m.fake takes texts, numbers and tables",
    ),
]

UNKNOWN = [
    (
        f"{M}max_concurency = 8\n",
        3,
        "unknown key models.m.max_concurency; did you mean max_concurrency?",
    ),
    (f"{M}max_queue = 8\n", 3, "unknown key models.m.max_queue; it belongs to [supervisor]"),
    (
        f"[supervisor]\npreload = true\n{M}",
        2,
        "unknown key supervisor.preload; it belongs to [models.NAME] or [defaults]",
    ),
    (
        f"{M}window_s = 1\n",
        3,
        "unknown key models.m.window_s; it belongs to [models.NAME.restart]",
    ),
    (
        f"[defaults]\ntop_k = 1\n{M}",
        2,
        "unknown key defaults.top_k; it belongs to [models.NAME.sampling]",
    ),
    (f"{M}zzz = true\n", 3, f"unknown key models.m.zzz; known are {MODEL_KEYS}"),
    (f"[modles.m]\n{M}", 1, "unknown key modles; did you mean models?"),
    (
        f"zzz = 1\n{M}",
        1,
        "unknown key zzz; known are supervisor, gateway, clients, defaults, models",
    ),
    (
        f"{M}[models.m.restart]\nwindows_s = 1\n",
        4,
        "unknown key models.m.restart.windows_s; did you mean window_s?",
    ),
    (
        f"[defaults.restart]\nwindows_s = 1\n{M}",
        2,
        "unknown key defaults.restart.windows_s; did you mean window_s?",
    ),
    (
        f"{M}[models.m.sampling]\ntop_pp = 1\n",
        4,
        "unknown key models.m.sampling.top_pp; did you mean top_p?",
    ),
    (
        f"[defaults.sampling]\ntop_pp = 1\n{M}",
        2,
        "unknown key defaults.sampling.top_pp; did you mean top_p?",
    ),
    (
        f"[defaults]\npreloda = true\n{M}",
        2,
        "unknown key defaults.preloda; did you mean preload?",
    ),
    (
        f"[supervisor]\nmax_queu = 1\n{M}",
        2,
        "unknown key supervisor.max_queu; did you mean max_queue?",
    ),
]

VALUES = [
    ("[models.m]\npath = 3\n", 2, "models.m.path takes a folder, not 3"),
    ('[models.m]\npath = ""\n', 2, 'models.m.path takes a folder, not ""'),
    ("[models.m]\npath = { a = 1 }\n", 2, "models.m.path takes a folder, not a table"),
    (f'[supervisor]\nruntime_dir = ""\n{M}', 2, 'supervisor.runtime_dir takes a folder, not ""'),
    (f'[supervisor]\nlog_dir = ""\n{M}', 2, 'supervisor.log_dir takes a folder, not ""'),
    ('[models.m]\npath = "m\\u0000"\n', 2, r'models.m.path takes a folder, not "m\u0000"'),
    (
        f'[supervisor]\nruntime_dir = "/a\\u0000\\nb"\n{M}',
        2,
        r'supervisor.runtime_dir takes a folder, not "/a\u0000\nb"',
    ),
    (
        f'[supervisor]\nlog_dir = "\\u0000"\n{M}',
        2,
        r'supervisor.log_dir takes a folder, not "\u0000"',
    ),
    (f"{M}preload = 1\n", 3, "models.m.preload takes true or false, not 1"),
    (f"{M}deterministic = 0\n", 3, "models.m.deterministic takes true or false, not 0"),
    (
        f"{M}max_concurrency = {'9' * 61}\n",
        3,
        "models.m.max_concurrency cannot take an integer of more than 64 bits",
    ),
    *(
        (
            f"{M}max_concurrency = {given}\n",
            3,
            f"models.m.max_concurrency takes an integer from 1 to 1024, not {shown}",
        )
        for given, shown in [
            ("0", "0"),
            ("1025", "1025"),
            ('"8"', '"8"'),
            ("true", "true"),
            ("false", "false"),
            ("1.5", "1.5"),
            (f'"{"x" * 61}"', f'"{"x" * 60}"'),
        ]
    ),
    (f"{M}context_length = -1\n", 3, "models.m.context_length takes an integer from 0, not -1"),
    (
        f"{M}decode_stall_target_ms = 0\n",
        3,
        "models.m.decode_stall_target_ms takes an integer from 1, not 0",
    ),
    *(
        (f"[supervisor]\n{key} = 0\n{M}", 2, f"supervisor.{key} takes an integer from 1, not 0")
        for key in ("max_queue", "max_queue_per_client")
    ),
    *(
        (
            f"[supervisor]\nmax_parallel_prefills = {value}\n{M}",
            2,
            f'supervisor.max_parallel_prefills takes "auto", or an integer from 1, not {value}',
        )
        for value in ("0", '"all"', "true", "1.0")
    ),
    (
        f"[supervisor]\nmax_queue_bytes = 0\n{M}",
        2,
        f"supervisor.max_queue_bytes takes {BYTES}, not 0",
    ),
    (
        f'[supervisor]\nmax_queue_bytes = "256MB"\n{M}',
        2,
        f'supervisor.max_queue_bytes takes {BYTES}, not "256MB"',
    ),
    (
        f'[supervisor]\nlog_level = "loud"\n{M}',
        2,
        'supervisor.log_level takes "debug", "info", "warning" or "error", not "loud"',
    ),
    *(
        (f"{M}{key} = -1\n", 3, f'models.m.{key} takes "auto", or {BYTES}, not -1')
        for key in ("memory", "cache_limit", "prefix_cache")
    ),
    (f'{M}memory = "off"\n', 3, f'models.m.memory takes "auto", or {BYTES}, not "off"'),
    (f'{M}wired = "on"\n', 3, f'models.m.wired takes "off", "auto", or {BYTES}, not "on"'),
    (f'{M}engine = "vllm"\n', 3, 'models.m.engine takes "mlx" or "fake", not "vllm"'),
    (
        f'{M}idle_unload_s = "soon"\n',
        3,
        f'models.m.idle_unload_s takes {SECONDS}, not "soon"',
    ),
    *(
        (f"[supervisor]\n{key} = -1\n{M}", 2, f"supervisor.{key} takes {SECONDS}, not -1")
        for key in ("drain_timeout_s", "queue_timeout_s", "first_token_timeout_s", "aging_s")
    ),
    (f"{M}step_timeout_s = nan\n", 3, f"models.m.step_timeout_s takes {SECONDS}, above 0, not nan"),
    (f"{M}step_timeout_s = 0\n", 3, f"models.m.step_timeout_s takes {SECONDS}, above 0, not 0.0"),
    (
        f"{M}load_stall_timeout_s = 0\n",
        3,
        f"models.m.load_stall_timeout_s takes {SECONDS}, above 0, not 0.0",
    ),
    (
        f"{M}restart.window_s = 0\n",
        3,
        f"models.m.restart.window_s takes {SECONDS}, above 0, not 0.0",
    ),
    (
        f"{M}[models.m.restart]\nmax_restarts = -1\n",
        4,
        "models.m.restart.max_restarts takes an integer from 0, not -1",
    ),
    (
        f"[defaults.restart]\nmax_restarts = -1\n{M}",
        2,
        "defaults.restart.max_restarts takes an integer from 0, not -1",
    ),
    (
        f"{M}[models.m.restart]\nwindow_s = 9\nbackoff_max_s = 0.5\n",
        5,
        "models.m.restart.backoff_max_s takes at least backoff_initial_s (1), not 0.5",
    ),
    (
        f"{M}restart = {{ backoff_max_s = 0.5 }}\n",
        3,
        "models.m.restart.backoff_max_s takes at least backoff_initial_s (1), not 0.5",
    ),
    (
        f"{M}sampling.top_p = 0\n",
        3,
        "models.m.sampling.top_p takes a number above 0 and up to 1, not 0.0",
    ),
    (
        f"[defaults.sampling]\ntemperature = true\n{M}",
        2,
        "defaults.sampling.temperature takes a number from 0 to 10, not true",
    ),
]

NAMES = [
    ('[models."a/b"]\npath = "m"\n', 1, f"models.'a/b': {NAME}"),
    ('[models.".a"]\npath = "m"\n', 1, f"models.'.a': {NAME}"),
    (f'[models.{"a" * 65}]\npath = "m"\n', 1, f"models.'{'a' * 65}': {NAME}"),
    ('[models.mlxsup]\npath = "m"\n', 1, "models.mlxsup: the name mlxsup is the daemon's own"),
    ('[models.MLXsup]\npath = "m"\n', 1, "models.MLXsup: the name mlxsup is the daemon's own"),
    (
        '[models.a]\npath = "m"\n[models.A]\npath = "m"\n',
        3,
        "models.A: differs from models.a only in case",
    ),
]

SYNTAX = [
    ('[models.m]\npath = "m\n', 2, "is not TOML: Illegal character '\\n', column 10"),
    ("[models.m\n", 1, "is not TOML: Expected ']' at the end of a table declaration, column 10"),
    ('[models.m]\npath = """m\n', 3, "is not TOML: Unterminated string"),
]


@pytest.mark.parametrize(
    ("text", "line", "expected"), [*TABLES, *UNKNOWN, *VALUES, *NAMES, *SYNTAX]
)
def test_a_mistake_names_file_line_key_and_what_was_expected(
    tmp_path: Path, text: str, line: int, expected: str
) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.problems == [f"{path}:{line}: {expected}"]
    assert str(caught.value) == f"{path}:{line}: {expected}"
    assert caught.value.exit_code == 78


def test_what_is_just_within_the_limits_is_taken(tmp_path: Path) -> None:
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


def test_problems_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mlxsup.toml"
    path.write_text("[models.m]\n[defaults]\npreload = 1\n[supervisor]\nmax_queue = 0\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    lines = [problem.removeprefix(f"{path}:").split(":")[0] for problem in caught.value.problems]
    assert lines == ["1", "3", "5"]
