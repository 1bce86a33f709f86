"""A configuration that is nested too deeply is refused before anything descends into it, or reads
it: what tomllib takes for a key grows with the square of its parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.protocol.places import MAX_KEY_PARTS, UnreadableConfigError, read_toml
from mlxsup.supervisor.config.load import MAX_DEPTH, ConfigError, load_config

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


@pytest.mark.parametrize("text", ["a" * 900_000, '"a" ' * 200_000, "a.b " * 200_000])
def test_a_file_without_such_a_key_is_looked_through_in_a_moment(tmp_path: Path, text: str) -> None:
    assert "is not TOML" in refusal(tmp_path / "flat.toml", text)


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
