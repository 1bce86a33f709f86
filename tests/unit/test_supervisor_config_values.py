"""Durations and sizes as people write them, and the lines on which keys stand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mlxsup.supervisor.config.folders import config_of_folders, split_model
from mlxsup.supervisor.config.lines import LineIndex
from mlxsup.supervisor.config.load import load_config
from mlxsup.supervisor.config.values import (
    check_duration,
    check_size_auto_or_off,
    check_size_or_auto,
    parse_size,
    size_or_auto,
)

MiB = 2**20


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
def test_whatever_else_is_no_duration(given: object) -> None:
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
        (" 2 MiB ", 2 * MiB),
        ("3GiB", 3 * 1024 * MiB),
        ("4TiB", 4 * 1024**2 * MiB),
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
def test_whatever_else_is_no_size(given: object) -> None:
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
def test_what_is_inside_of_a_value_is_no_key_and_what_follows_it_is(
    value: str, equals: str
) -> None:
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


def test_a_folder_in_a_home_is_found_and_one_of_nobody_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert split_model("~/m") == ("m", Path("/home/me/m"))
    assert split_model("n=~/m") == ("n", Path("/home/me/m"))
    assert split_model("~no-such-user/m") == ("m", tmp_path / "~no-such-user" / "m")
    assert split_model("=m") == ("=m", tmp_path / "=m")
