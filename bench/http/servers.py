"""Servers of OpenAI's API, all asked over HTTP by the same reader."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxsup.cli.benchmark.asking import PATH, ask_over_http, checked
from mlxsup.cli.benchmark.burst import Burst
from mlxsup.cli.benchmark.http_reading import Address, ask

from ..peers import Answer, OnToken, ServerProcess
from support.http_daemon import HttpDaemon

ROOT = Path(__file__).parents[2]
VLLM_MLX = ROOT / "build" / "vllm-mlx"
"""Where the packages of vllm-mlx are, if somebody has installed them (docs/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverHttp:
    """One of them; see `peers.Server`.

    Attributes:
        name: for reports.
        address: host and port.
        models: what it calls them, by the names that `ask` takes.
        process: None for mlxsup, whose daemon has several.
    """

    name: str
    address: Address
    models: Mapping[str, str]
    process: ServerProcess | None = None

    async def ask(
        self, model: str, prompt: str, max_tokens: int, on_token: OnToken | None = None
    ) -> Answer:
        """See `peers.Server`."""
        asked_at = time.perf_counter()
        reader = await ask(self.address, PATH, self._body(model, prompt, max_tokens), on_token)
        await reader.ended
        read = checked(reader.read(), max_tokens)
        return Answer(
            asked_at=asked_at,
            first_at=read.times[0],
            ended_at=time.perf_counter(),
            prompt_tokens=read.prompt_tokens,
            tokens=read.tokens,
        )

    async def burst(self, model: str, prompts: Sequence[str], tokens: int) -> Burst:
        """Sends all prompts at once.

        An event may hold several tokens; the last one of an answer is counted as often as it takes.

        Raises:
            AnswerError: an answer has another length, or is not whole.
            OSError: a connection has failed.
        """
        bodies = [self._body(model, prompt, tokens) for prompt in prompts]
        return await ask_over_http(self.address, bodies, tokens)

    def _body(self, model: str, prompt: str, tokens: int) -> dict[str, Any]:
        name = self.models[model]
        return {"model": name, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0}


def mlxsup(daemon: HttpDaemon, models: Sequence[str]) -> OverHttp:
    """The gateway of a daemon."""
    names = {model: model for model in models}
    return OverHttp(name="mlxsup", address=daemon.address, models=names)


def mlx_lm(process: ServerProcess, folders: Mapping[str, Path]) -> OverHttp:
    """mlx_lm.server with these models, of which it holds one at a time."""
    return _peer(process, folders)


def vllm_mlx(process: ServerProcess, name: str, folder: Path) -> OverHttp:
    """vllm-mlx, which has the model that it was started with."""
    return _peer(process, {name: folder})


def start_vllm_mlx(folder: Path, streams: int) -> ServerProcess:
    """Starts it with that many rows.

    Raises:
        AssertionError: as its block is entered: it does not start.
    """
    arguments = ["-m", "vllm_mlx.cli", "serve", str(folder), "--continuous-batching"]
    rows = ["--max-num-seqs", str(streams), "--completion-batch-size", str(streams)]
    prompts = ["--prefill-batch-size", str(streams)]
    return ServerProcess("vllm-mlx", [*arguments, *rows, *prompts], {"PYTHONPATH": str(VLLM_MLX)})


def _peer(process: ServerProcess, folders: Mapping[str, Path]) -> OverHttp:
    names = {name: str(folder) for name, folder in folders.items()}
    return OverHttp(
        name=process.name, address=("127.0.0.1", process.port), models=names, process=process
    )
