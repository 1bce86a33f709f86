"""`config check` finds what `start` refuses: both ask what the models need, by their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxsup.supervisor.config.load import ConfigError, DaemonConfig, load_config
from mlxsup.supervisor.memory.problems import check_memory

from support.safetensors_files import llama_arrays, llama_config, write_folder


def config_of(folder: Path, budget: str, entry: str) -> DaemonConfig:
    """Two models of the same small folder, each with these keys, and one that is missing."""
    write_folder(folder / "model", llama_config(), llama_arrays())
    path = folder / "mlxsup.toml"
    models = "".join(f'[models.{name}]\npath = "model"\n{entry}\n' for name in "ab")
    gone = '[models.gone]\npath = "gone"\npinned = true\n'
    path.write_text(f'[supervisor]\nmemory_budget = "{budget}"\n{models}{gone}')
    return load_config(path)


def test_pinned_models_without_memory_that_do_not_fit_together_are_found(tmp_path: Path) -> None:
    config = config_of(tmp_path, "300MiB", "pinned = true")
    with pytest.raises(ConfigError) as caught:
        check_memory(config)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{config.config_path}: the pinned models a (")
    assert problem.endswith("unpin one, or raise supervisor.memory_budget")


def test_those_that_fit_are_not(tmp_path: Path) -> None:
    check_memory(config_of(tmp_path, "2GiB", "pinned = true"))


def test_a_memory_below_the_weights_is_found_for_each_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(config_of(tmp_path, "2GiB", "memory = 1"))
    where = f"{tmp_path / 'mlxsup.toml'}: models"
    first, second = caught.value.problems
    assert first.startswith(f"{where}.a.memory is not enough: its memory is 1 B, and it needs")
    assert second.startswith(f"{where}.b.memory is not enough")
