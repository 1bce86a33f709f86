"""Folders that are read in this process, instead of those of their own that have to start first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.codec import read_part, to_line
from mlxsup.protocol.estimate import ModelMemory
from mlxsup.protocol.launch import LaunchSettings
from mlxsup.supervisor.memory import estimates
from mlxsup.supervisor.memory.folder import UNASKED, Estimate, read_folder
from mlxsup.supervisor.memory.folder_reader import Look, Question, look
from mlxsup.supervisor.memory.needs import estimate_folders

WHY = "mlx-lm does not know its type"
UNSERVED = f"{UNASKED}: {WHY}"


async def ask_here(questions: Sequence[Question], **_: object) -> dict[int, Look | str]:
    """Answers as the process would, over the same lines."""
    asked = [read_part(Question, json.loads(to_line(one)), "") for one in questions]
    return {one.number: read_part(Look, json.loads(to_line(look(one))), "") for one in asked}


async def ask_engine_here(keys: Mapping[str, str], **_: object) -> dict[str, ModelMemory | str]:
    """Answers for the llama of `safetensors_files` as mlx-lm does, and for no other type."""
    found: dict[str, ModelMemory | str] = {}
    for path in keys:
        config = json.loads((Path(path) / "config.json").read_bytes())
        if config["model_type"] != "llama":
            found[path] = WHY
            continue
        numbers = 2 * config["num_key_value_heads"] * 16
        layers = (CacheLayers(layers=config["num_hidden_layers"], token_bytes=2 * numbers),)
        here = read_folder(Path(path))
        assert isinstance(here, Estimate)
        found[path] = ModelMemory(weight_bytes=here.weight_bytes, layers=layers)
    return found


def estimated(launch: LaunchSettings) -> Estimate | None:
    """What is known of a model before its first load; None of the fake engine."""
    if launch.engine == "fake":
        return None
    found = estimate_folders({launch.path: launch.adapters.values()})[launch.path]
    assert isinstance(found, Estimate), found
    return found


@pytest.fixture
def estimates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every folder read in this process."""
    monkeypatch.setattr(estimates, "ask", ask_here)
    monkeypatch.setattr(estimates, "ask_engine", ask_engine_here)
