"""The rows of the HTTP gateway's table, and how each is measured: `python -m bench http`."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from ..burst import REQUESTS, ROWS, asking
from ..fast_path.quiet import until_quiet
from ..fast_path.results import Found
from ..fast_path.stages import Rows, Setting, Stage
from ..floor import Floor
from ..peers import MlxLmServer, ServerProcess
from ..two_models import ANSWER, Seen, quiet, watch, words, words_per_second
from .bursts import Contest, Rounds, note_of
from .claims import STREAMS
from .cost import paced_row, unpaced_row
from .servers import VLLM_MLX, OverHttp, mlx_lm, mlxsup, start_vllm_mlx, vllm_mlx
from support.http_daemon import HttpDaemon
from support.tiny_model import make_tiny_model

SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"
TINY_TOKENS, TINY_REPEATS = 256, 7
SMOLLM2_TOKENS, SMOLLM2_REPEATS = 8, 3
"""It generates some ten tokens per second on two cores, and reads as slowly."""

BESIDE_REPEATS = 5
PREFILL_S = 9.0
"""How long the long prompt takes to read, alone."""

SWAPS = (
    "mlx_lm.server holds one model at a time: a request for the other one waits for the running"
    " batch to end and swaps the models, and whoever asks for the first one waits until it is back"
)
NOT_INSTALLED = "it is not installed in build/vllm-mlx"


@asynccontextmanager
async def contest(name: str, folder: Path, rows: int) -> AsyncIterator[Contest]:
    """Everybody with this model, loaded, with that many rows."""
    async with AsyncExitStack() as stack:
        floor = stack.enter_context(Floor(folder, rows))
        entry = {"path": str(folder), "max_concurrency": rows}
        daemon = stack.enter_context(HttpDaemon({name: entry}))
        with daemon.client() as client:
            client.load(name)
        options = ("--decode-concurrency", str(rows), "--prompt-concurrency", str(rows))
        missing: dict[str, str] = {}
        peers: list[OverHttp] = []
        mlx_lm_server = started(stack, MlxLmServer({name: folder}, *options), missing)
        if mlx_lm_server is not None:
            peers.append(mlx_lm(mlx_lm_server, {name: folder}))
        if not VLLM_MLX.exists():
            missing["vllm-mlx"] = NOT_INSTALLED
        elif (vllm := started(stack, start_vllm_mlx(folder, rows), missing)) is not None:
            peers.append(vllm_mlx(vllm, name, folder))
        ours = mlxsup(daemon, [name])
        yield Contest(ours=ours, floor=floor, peers=peers, model=name, missing=missing)


def started(
    stack: AsyncExitStack, process: ServerProcess, missing: dict[str, str]
) -> ServerProcess | None:
    """A server of somebody else, unless it does not start here; its log fails no row."""
    try:
        stack.enter_context(process)
    except AssertionError:
        missing[process.name] = "it does not start"
        return None
    stack.callback(process.give_up)
    return process


async def bursts(
    name: str, folder: Path, setting: Setting, wanted: Sequence[str], tokens: int, repeats: int
) -> Rows:
    """Bursts of everybody, for each number of streams."""
    rows = [(f"http_{name}_{streams}", streams) for streams in STREAMS]
    async with contest(name, folder, max(STREAMS)) as everybody:
        for row, streams in rows:
            if row not in wanted:
                continue
            await everybody.round(None, streams, tokens)
            rounds = Rounds()
            for _ in range(setting.runs(repeats)):
                await until_quiet(setting)
                await everybody.round(rounds, streams, tokens)
            yield (
                row,
                {
                    row: rounds.found("whole_per_s", "tok/s"),
                    f"{row}_first": rounds.found("first_s", "ms", 1000.0),
                },
            )


async def tiny(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Bursts of the tiny model."""
    folder = make_tiny_model(setting.models / "tiny")
    tokens = 32 if setting.is_small else TINY_TOKENS
    async for row in bursts("tiny", folder, setting, wanted, tokens, TINY_REPEATS):
        yield row


async def smollm2(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Bursts of SmolLM2."""
    folder = make_tiny_model(setting.models / "tiny") if setting.is_small else SMOLLM2
    async for row in bursts("smollm2", folder, setting, wanted, SMOLLM2_TOKENS, SMOLLM2_REPEATS):
        yield row


async def burst(setting: Setting, wanted: Sequence[str]) -> Rows:
    """Sixteen requests from four clients, for four rows."""
    folder = make_tiny_model(setting.models / "tiny")
    times: dict[str, list[list[float]]] = {}
    async with contest("tiny", folder, ROWS) as everybody:
        for repeat in range(setting.runs(TINY_REPEATS) + 1):
            await until_quiet(setting)
            firsts = {"mlxsup": await asking(everybody.ours)(ROWS, repeat * 100)}
            for peer in list(everybody.peers):
                asked = asking(peer)(ROWS, repeat * 100)
                if (found := await everybody.unless_it_fails(peer, asked)) is not None:
                    firsts[peer.name] = found
            for name, found in firsts.items():
                assert len(found) == REQUESTS, f"{name} answered {len(found)} requests"
                if repeat:  # a first round warms all of them up
                    times.setdefault(name, []).append(found)
        missing = everybody.missing
    times = {name: found for name, found in times.items() if name not in missing}
    sides = {
        f"{name}, median": [statistics.median(one) * 1000 for one in found]
        for name, found in times.items()
    } | {f"{name}, slowest": [max(one) * 1000 for one in found] for name, found in times.items()}
    values = [max(one) / statistics.median(one) for one in times["mlxsup"]]
    about = Found(values=values, sides=sides, unit="ms", note=note_of(missing))
    yield "http_burst", {"http_burst": about}


async def beside(setting: Setting, wanted: Sequence[str]) -> Rows:
    """A tiny model that streams while another one reads a long prompt."""
    small = make_tiny_model(setting.models / "tiny")
    folders = {"a": small if setting.is_small else SMOLLM2, "b": small}
    entries = {name: {"path": str(folder)} for name, folder in folders.items()}
    seen: dict[str, list[tuple[Seen, Seen]]] = {}
    async with AsyncExitStack() as stack:
        daemon = stack.enter_context(HttpDaemon(entries))
        with daemon.client() as client:
            for name in folders:
                client.load(name)
        peer = stack.enter_context(MlxLmServer(folders))
        servers = [mlxsup(daemon, list(folders)), mlx_lm(peer, folders)]
        speed = await words_per_second(servers[0], "a")
        count = 24 if setting.is_small else int(PREFILL_S * speed)
        for repeat in range(setting.runs(BESIDE_REPEATS)):
            prompt = words(count, 10 + repeat)
            for server in servers:
                await until_quiet(setting)
                alone = await watch(server, "b", ANSWER, quiet)
                read = partial(server.ask, "a", prompt, 1)
                meanwhile = await watch(server, "b", ANSWER, read)
                seen.setdefault(server.name, []).append((alone, meanwhile))
    yield "http_beside", beside_founds(seen)


def beside_founds(seen: Mapping[str, Sequence[tuple[Seen, Seen]]]) -> dict[str, Found]:
    """The figures of `beside`.

    Args:
        seen: by the server's name: alone, and while the other model reads.
    """
    gaps: dict[str, list[float]] = {}
    firsts: dict[str, list[float]] = {}
    for name, pairs in seen.items():
        for index, when in enumerate(("alone", "meanwhile")):
            windows = [pair[index] for pair in pairs]
            gaps[f"{name}, {when}"] = [window.silence_ms for window in windows]
            firsts[f"{name}, {when}"] = [statistics.median(one.first_ms) for one in windows]
    both = zip(firsts["mlxsup, meanwhile"], firsts["mlxsup, alone"], strict=True)
    return {
        "http_beside": Found(values=gaps["mlxsup, meanwhile"], sides=gaps, unit="ms", note=SWAPS),
        "http_beside_first": Found(
            values=[beside / alone for beside, alone in both], sides=firsts, unit="ms"
        ),
    }


LIMIT_S = 3600.0
"""Of a row: most of it is spent waiting until the machine is quiet."""

MEASURES: dict[str, tuple[tuple[str, ...], Callable[[Setting, Sequence[str]], Rows]]] = {
    "cpu": (("http_cpu",), unpaced_row),
    "paced": (("http_paced",), paced_row),
    "tiny": (tuple(f"http_tiny_{streams}" for streams in STREAMS), tiny),
    "burst": (("http_burst",), burst),
    "beside": (("http_beside",), beside),
    "smollm2": (tuple(f"http_smollm2_{streams}" for streams in STREAMS), smollm2),
}

STAGES = tuple(
    Stage(name=name, rows=rows, measure=measure, limit_s=LIMIT_S)
    for name, (rows, measure) in MEASURES.items()
)
