"""Vectors for 10,000 texts: what the daemon takes next to a bare loop, and what kills change.

The bare loop is the engine in this process, given the same lists one after the other.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from mlxsup.client import Client
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.pooling import PoolingBody
from mlxsup.worker.engine import Engine, Row
from mlxsup.worker.engines.opening import open_engine

from .report import order_in_round, print_table, spread, threads_ns
from support.daemon.daemon import Daemon, row, wait_for_state
from support.daemon.faults import PATIENT
from support.models.tiny_encoder import WORDS, make_tiny_encoder
from support.worker.mlx_rows import make_spec

TEXTS = 10_000
LIST = 500
KILLS = 20
SIDES = ("bare loop", "daemon")

Vectors = list[bytes]


def run(repeats: int, count: int = TEXTS) -> None:
    """Print the speed of both, and check each vector of an answer whose worker is killed."""
    numbers = random.Random(1)
    texts = [" ".join(numbers.choices(WORDS, k=numbers.randint(2, 40))) for _ in range(count)]
    lists = [texts[begin : begin + LIST] for begin in range(0, count, LIST)]
    with tempfile.TemporaryDirectory() as parent:
        folder = make_tiny_encoder(Path(parent) / "encoder", "bert")
        engine = open_engine(make_spec(folder), time.perf_counter)
        engine.load(lambda phase, progress: None)
        alone = [_embed(engine, [text])[0] for text in texts]
        with (
            Daemon({"m": {"path": str(folder), "restart": PATIENT}}) as daemon,
            daemon.client() as client,
        ):
            wait_for_state(client, "m", "READY")
            ratios, cpu_ratios = [], []
            for repeat in range(repeats + 1):
                took = {
                    side: _measure(side, engine, client, lists, alone)
                    for side in order_in_round(SIDES, repeat)
                }
                if repeat:  # the first round warms up
                    ratios.append(took["bare loop"][0] / took["daemon"][0])
                    cpu_ratios.append(took["bare loop"][1] / took["daemon"][1])
            restarts = _kill_again_and_again(client, lists, alone)
        engine.close()
    head = ("figure", "value")
    table = [
        ("texts per second over the bare loop", spread(ratios)),
        ("the same, by the processor time of the worker", spread(cpu_ratios)),
        ("texts answered, each once and as alone", f"{count}, workers killed: {restarts}"),
    ]
    print_table(head, table)


def _measure(
    side: str, engine: Engine, client: Client, lists: Sequence[list[str]], alone: Vectors
) -> tuple[float, float]:
    """Return the seconds and those of the processor that a side takes for all lists."""
    began_at, vectors = time.perf_counter(), []
    if side == "daemon":
        pid = row(client, "m")["pid"]
        before = sum(threads_ns(pid).values())
        for stream in [client._send("m", {"texts": own}) for own in lists]:
            for _ in stream:
                pass
            got = dict(zip(stream.result.token_ids, stream.result.vectors, strict=True))
            vectors += [got[number] for number in range(len(got))]
        cpu_s = (sum(threads_ns(pid).values()) - before) / 1e9
    else:
        cpu_s = -time.process_time()
        for own in lists:
            vectors += _embed(engine, own)
        cpu_s += time.process_time()
    took_s = time.perf_counter() - began_at
    assert vectors == alone, f"{side}: other vectors than alone"
    return took_s, cpu_s


def _embed(engine: Engine, texts: list[str]) -> Vectors:
    prompt = engine.text.encode_texts(PoolingBody(texts=list(texts)))
    count = len(prompt.lengths)
    given = Row(
        key=RequestKey(1), tokens=prompt.tokens, max_tokens=count, seed=0, lengths=prompt.lengths
    )
    engine.insert(given)
    found: dict[int, bytes] = {}
    while engine.row_count():
        for token in engine.step().tokens:
            assert token.token is not None
            assert token.vector is not None
            assert token.token not in found
            found[token.token] = token.vector
    return [found[number] for number in range(count)]


def _kill_again_and_again(client: Client, lists: Sequence[list[str]], alone: Vectors) -> int:
    """Kill the worker while it answers each list; return how many workers there were besides."""
    first = row(client, "m")["generation"]
    for place, own in enumerate(lists):
        stream = client._send("m", {"texts": own})
        numbers: list[int] = []
        is_killed = place >= KILLS
        for piece in stream:
            numbers += piece.token_ids
            if not is_killed and len(numbers) >= 1 + place * len(own) // (2 * KILLS):
                os.kill(row(client, "m")["pid"], signal.SIGKILL)
                is_killed = True
        assert sorted(numbers) == list(range(len(own))), "one is missing or came twice"
        got = dict(zip(stream.result.token_ids, stream.result.vectors, strict=True))
        wanted = alone[place * LIST : place * LIST + len(own)]
        assert [got[number] for number in range(len(own))] == wanted, "other vectors than alone"
    return int(row(client, "m")["generation"]) - int(first)
