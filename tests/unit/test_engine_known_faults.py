"""The faults of mlx-lm that a worker knows are still there, and concern whom they should."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from mlxsup.worker.engines.mlx.known_faults import (
    KNOWN_FAULTS,
    KnownFault,
    find_fault,
    find_warnings,
)

DOCS = Path(__file__).parents[2] / "docs"


def mlx_lm_folder() -> Path:
    """Where mlx-lm is, without importing it."""
    spec = importlib.util.find_spec("mlx_lm")
    if spec is None or spec.origin is None:
        pytest.skip("mlx-lm is not installed")
    return Path(spec.origin).parent


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.model_type)
def test_a_fault_is_still_at_its_line_of_mlx_lm(fault: KnownFault) -> None:
    lines = (mlx_lm_folder() / "models" / fault.file).read_text().splitlines()
    assert fault.symbol in lines[fault.line - 1]


@pytest.mark.parametrize(
    ("config", "is_concerned"),
    [
        ({"model_type": "plamo3"}, True),
        ({"model_type": "plamo3", "sliding_window_pattern": 4}, True),
        ({"model_type": "plamo3", "sliding_window_pattern": 1}, False),
        ({"model_type": "plamo3", "num_hidden_layers": 1}, True),
        ({"model_type": "plamo3", "num_hidden_layers": 0}, False),
        ({"model_type": "plamo2"}, False),
        ({"model_type": "phi3small"}, True),
        ({"model_type": "olmo"}, True),
        ({"model_type": "olmo2"}, False),
        ({}, False),
    ],
)
def test_a_fault_concerns_the_configurations_that_have_it(
    config: dict[str, object], is_concerned: bool
) -> None:
    fault = find_fault(config)
    assert (fault is not None) is is_concerned
    assert fault is None or fault.model_type == config["model_type"]


@pytest.mark.parametrize("fault", KNOWN_FAULTS, ids=lambda fault: fault.model_type)
def test_a_fault_says_what_is_wrong_and_where(fault: KnownFault) -> None:
    assert str(fault) == f"{fault.what} (mlx_lm/models/{fault.file}:{fault.line})"
    assert fault.what.startswith("mlx-lm ")


@pytest.mark.parametrize("name", ["adapters.safetensors", "adapter_model.safetensors"])
def test_an_adapter_that_is_not_applied_is_named(tmp_path: Path, name: str) -> None:
    config = {"model_type": "llama"}
    assert find_warnings(tmp_path, config) == ()
    (tmp_path / name).touch()
    (warning,) = find_warnings(tmp_path, config)
    assert warning == (
        f"{name} is not applied: adapters are not supported, merge it into the weights "
        "(mlx_lm.fuse) to use it"
    )


def test_a_remedy_is_a_warning_and_a_refusal_is_none(tmp_path: Path) -> None:
    (warning,) = find_warnings(tmp_path, {"model_type": "plamo3"})
    assert "mlx_lm/models/plamo3.py:236" in warning
    assert find_warnings(tmp_path, {"model_type": "phi3small"}) == ()


def test_every_line_of_mlx_lm_that_the_documents_name_is_there() -> None:
    package = mlx_lm_folder()
    named = [
        (document.name, *found)
        for document in sorted(DOCS.rglob("*.md"))
        for found in re.findall(r"`mlx_lm/([\w/.-]+\.py):(\d+)`, `([^`]+)`", document.read_text())
    ]
    assert {file for _, file, _, _ in named} >= {f"models/{fault.file}" for fault in KNOWN_FAULTS}
    for document, file, line, symbol in named:
        lines = (package / file).read_text().splitlines()
        assert symbol in lines[int(line) - 1], f"{document}: {file}:{line} holds no {symbol}"
