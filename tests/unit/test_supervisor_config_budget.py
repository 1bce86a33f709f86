"""The key `memory_budget`: what it takes, and that no machine is planned with more than it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config import check as check_module
from mlxsup.supervisor.config.load import ConfigError, load_config

M = '[models.m]\npath = "m"\n'
SIZE = '"auto", or bytes as an integer, or text such as "256MiB"'
GIB = 2**30


def problem_of(folder: Path, given: str) -> str:
    """What is wrong with a configuration of this budget; its place is checked."""
    path = folder / "mlxsup.toml"
    path.write_text(f"{M}[supervisor]\nmemory_budget = {given}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    [problem] = caught.value.problems
    assert problem.startswith(f"{path}:4: ")
    return problem.removeprefix(f"{path}:4: ")


@pytest.mark.parametrize("given", ["-1", '"off"', '"24GB"', "true"])
def test_it_takes_a_size(tmp_path: Path, given: str) -> None:
    said = problem_of(tmp_path, given)
    assert said == f"supervisor.memory_budget takes {SIZE}, not {given}"


@pytest.mark.parametrize("given", ["0", '"0GiB"'])
def test_nothing_is_no_budget(tmp_path: Path, given: str) -> None:
    assert problem_of(tmp_path, given) == "supervisor.memory_budget takes a size above 0"


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
    assert problem_of(tmp_path, '"8.5 GiB"') == (
        "supervisor.memory_budget takes at most what this machine has (8.00 GiB), not 8.50 GiB"
    )
    assert asked == [(8 * GIB, "cuda"), (17 * GIB // 2, "cuda")]
    # Whoever leaves it to mlxsup asks nobody.
    path.write_text(f'{M}[supervisor]\nmemory_budget = "auto"\n')
    assert load_config(path).memory_budget is None
    assert len(asked) == 2
