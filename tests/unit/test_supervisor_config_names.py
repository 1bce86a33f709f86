"""Names of models: aliases, presets, and those of other APIs; each means one model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import ConfigError, load_config


def problems_of(folder: Path, text: str) -> list[str]:
    """What is wrong with a configuration, without the name of the file."""
    path = folder / "c.toml"
    path.write_text(text)
    try:
        load_config(path)
    except ConfigError as error:
        return [problem.removeprefix(f"{folder}/c.toml:") for problem in error.problems]
    return []


def two(first: str, second: str = "") -> str:
    return f'[models.a]\npath = "a"\n{first}\n[models.b]\npath = "b"\n{second}\n'


def test_aliases_are_names_besides_that_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(two('aliases = ["gpt-4o", "org/Model_1.5"]'))
    models = load_config(path).models
    assert [model.aliases for model in models] == [("gpt-4o", "org/Model_1.5"), ()]


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ('aliases = ["b"]', "", "3: models.a.aliases has b, which already means models.b"),
        ('aliases = ["a"]', "", "3: models.a.aliases has a, which already means models.a"),
        ('aliases = ["x", "x"]', "", "3: models.a.aliases has x, which already means models.a"),
        (
            'aliases = ["x"]',
            'aliases = ["x"]',
            "6: models.b.aliases has x, which already means models.a",
        ),
        ('aliases = ["a:b"]', "", "3: models.a.aliases takes names of 1 to 128 of the characters"),
        ('aliases = [""]', "", "3: models.a.aliases takes names of 1 to 128 of the characters"),
        ('aliases = "x"', "", '3: models.a.aliases takes an array of names, not "x"'),
        ("aliases = [3]", "", "3: models.a.aliases takes an array of names, not an array"),
    ],
)
def test_what_is_wrong_with_them_is_said(
    tmp_path: Path, first: str, second: str, problem: str
) -> None:
    (found,) = problems_of(tmp_path, two(first, second))
    assert found.startswith(problem)


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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[models.a.presets.'a:b']", "1: models.a.presets.a:b is no name for a preset"),
        ("[models.a.presets]\nx = 3", "2: models.a.presets.x takes a table, not 3"),
        ("[models.a.presets.x]\ntemperature = 99",
         "2: models.a.presets.x.temperature takes a number from 0 to 10, not 99"),
        ("[models.a.presets.x]\ntemprature = 1",
         "2: unknown key models.a.presets.x.temprature; did you mean temperature?"),
        ("[models.a.presets.x]\nchat_template_kwargs = { a = 2020-01-01 }",
         "1: models.a.presets.x.chat_template_kwargs takes texts, numbers and tables"),
        ("[models.a.presets.x]\nchat_template_kwargs = 3",
         "2: models.a.presets.x.chat_template_kwargs takes a table"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_preset_is_said(tmp_path: Path, text: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, f"{text}\n{two('')}")
    assert found.startswith(problem)


def test_names_of_other_apis_are_kept_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    alias = 'aliases = ["al"]'
    names = '"gpt-*" = "al"\n"claude-*" = "a:warm"\n"a/b" = "b"\n'
    path.write_text(f"[gateway.names]\n{names}{two(alias)}{WARM}")
    assert load_config(path).gateway_rules.names == (
        ("gpt-*", "al"), ("claude-*", "a:warm"), ("a/b", "b"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ('"x" = "c"', "2: gateway.names.x takes the name of a model, or NAME:PRESET, not 'c'"),
        ('"x" = "a:cold"', "2: gateway.names.x takes the name of a model, or NAME:PRESET"),
        ('"b" = "a"', "2: gateway.names.b has no effect: it is a name of models.b"),
        ('"a b" = "a"', "2: gateway.names.a b is no name: it takes 1 to 128 printable"),
        ('"x" = 3', "1: gateway.names takes a table of names, each with the name of a model"),
    ],
)
def test_what_is_wrong_with_those_is_said(tmp_path: Path, names: str, problem: str) -> None:
    (found,) = problems_of(tmp_path, f"[gateway.names]\n{names}\n{two('')}")
    assert found.startswith(problem)


def test_so_many_names_are_too_many(tmp_path: Path) -> None:
    names = "".join(f'"x{number}" = "a"\n' for number in range(65))
    (found,) = problems_of(tmp_path, f"[gateway.names]\n{names}{two('')}")
    assert found == "1: gateway.names takes at most 64 names, not 65"
