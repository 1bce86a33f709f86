"""A configuration that is nested too deeply is refused before anything descends into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import MAX_DEPTH, ConfigError, load_config

DOTS = ".".join(["deep"] * 3000)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 100_000,
        f'[models.m]\nengine = "fake"\n[models.m.fake.{DOTS}]\nend = 1',
        f'[models.m]\nengine = "fake"\nfake.{DOTS} = 1',
        f"{DOTS} = 1",
    ],
    ids=["brackets", "a table", "a key of a table", "a key"],
)
def test_a_file_nested_too_deeply_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    (problem,) = caught.value.problems
    assert problem.endswith("deep.toml: is nested too deeply to be a configuration")


def test_a_file_nested_as_deeply_as_allowed_is_read(tmp_path: Path) -> None:
    for depth, is_read in ((MAX_DEPTH - 4, True), (MAX_DEPTH - 3, False)):  # models, m, fake, root
        dots = ".".join(["deep"] * depth)
        path = tmp_path / "deep.toml"
        path.write_text(f'[models.m]\nengine = "fake"\nfake.{dots}.end = 1')
        if is_read:
            assert load_config(path).models[0].name == "m"
            continue
        with pytest.raises(ConfigError, match="nested too deeply"):
            load_config(path)
