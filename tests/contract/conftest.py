"""Both engines, loaded, for every test of the contract; MLX's in each way of running rows."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.states import Batching
from mlxsup.worker.engine import Engine
from mlxsup.worker.engines.fake.engine import FakeEngine

from support.worker.loop_driver import LoopDriver
from support.worker.turn_bench import make_spec

SHORT_CONTEXT = 512
"""Of the engine `short`, for a test that fills the context: reading 4,000 tokens takes seconds."""

ROUNDS = {
    "deepseek_v3": True,
    "falcon_h1": True,
    "gemma3_text": True,
    "mamba": False,
    "qwen3_next": False,
}
"""Tiny models of other types than llama, and whether their numbers are rounded differently in other
company or after a resume."""

SLOW = {
    "bf16", "deepseek_v3", "falcon_h1", "gemma3_text", "qwen3_next", Batching.SERIAL_PREFILL,
}  # fmt: skip
"""Of the types, `make test` tries the caches and the log-probabilities alone (tests/mlx); mamba
reads prompts one by one."""


def spec_for(name: str, path: Path, **changes: Any) -> LaunchSpec:
    return make_spec(engine=name, path=str(path), prefix_cache_bytes=0, **changes)


@pytest.fixture(scope="session")
def mlx_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder)
    return folder


@pytest.fixture(scope="session")
def bf16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.models.tiny_model import as_bfloat16, make_tiny_model

    return as_bfloat16(make_tiny_model(tmp_path_factory.mktemp("tiny") / "bf16"))


@pytest.fixture(
    scope="session",
    params=[
        "fake",
        *(
            pytest.param(name, marks=pytest.mark.mlx)
            for name in (*Batching, "bf16", *ROUNDS)
            if name not in SLOW
        ),
        *(pytest.param(name, marks=[pytest.mark.mlx, pytest.mark.slow]) for name in sorted(SLOW)),
    ],
)
def make(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], Engine]:
    """Makes an engine that is not loaded yet."""
    if request.param == "fake":
        fake = {"prefill_tokens_per_step": 64, "token_bytes": 64}
        return lambda: FakeEngine(spec_for("fake", Path("/nowhere"), fake=fake))
    from mlxsup.worker.engines.mlx.engine import MlxEngine

    from support.worker.mlx_rows import known_as

    if request.param in ROUNDS:
        spec = spec_for("mlx", make_type(tmp_path_factory.mktemp("type"), request.param))
    else:
        is_bf16 = request.param == "bf16"
        folder = request.getfixturevalue("bf16_folder" if is_bf16 else "mlx_folder")
        way = request.param if request.param in list(Batching) else Batching.TOGETHER
        spec = replace(spec_for("mlx", folder), known_batching=known_as(folder, way))
        if request.param == "short":
            spec = replace(spec, context_length=SHORT_CONTEXT)

    def make_mlx() -> Engine:
        return MlxEngine(spec)

    return make_mlx


def make_type(folder: Path, name: str) -> Path:
    """A tiny model of a type, in float32."""
    from support.model_types.build import make_model
    from support.model_types.listed import model_types

    (model_type,) = model_types([name])
    return make_model(folder / name, model_type)


@pytest.fixture(autouse=True)
def skip_what_rounding_may_change(request: pytest.FixtureRequest) -> None:
    """A draw among thousands of tokens, and a log-probability, may change with the last bit."""
    parameters = getattr(getattr(request.node, "callspec", None), "params", {})
    if ROUNDS.get(parameters.get("make", "")) and request.node.get_closest_marker("draws"):
        pytest.skip("the model's numbers are rounded differently in other company")


@pytest.fixture(scope="session")
def worker(make: Callable[[], Engine]) -> Iterator[LoopDriver]:
    """A step loop over a loaded engine; the tests share it."""
    engine = make()
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    yield driver
    driver.close()
    engine.close()
