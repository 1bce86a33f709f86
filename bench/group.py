"""Measures the control of a group of two ranks: the leader's own time in each step, and tokens per
second beside ranks that a few lines of code keep in step without any control."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import GroupHost
from mlxsup.worker.engine import Engine, Rank, Row, StepResult
from mlxsup.worker.engines.fake.engine import FakeEngine
from mlxsup.worker.engines.opening import free_address, open_engine, prepare
from mlxsup.worker.group.engine import GroupEngine

from .report import order_in_round, print_table, spread
from support.models.tiny_model import make_tiny_model
from support.worker.turn_bench import make_spec

ROWS = 8
STEPS = 2000
TOKENS = 200
WARM_UP = 20
CONTROL_US = 100
CONTROL_P99_US = 2000
SHARE = 0.95

HOSTS = (GroupHost(), GroupHost())


def run(repeats: int) -> None:
    """Measure and print."""
    print("## The control of a group (CPU, two ranks)\n")
    control = sorted(itertools.chain(*(control_us() for _ in range(repeats))))
    median, p99 = statistics.median(control), control[len(control) * 99 // 100]
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder) / "tiny")
        speeds: dict[str, list[float]] = {"group": [], "by hand": []}
        measures = {"group": group_speed, "by hand": speed_by_hand}
        for repeat in range(repeats):
            for side in order_in_round(list(measures), repeat):
                speeds[side].append(measures[side](path))
    ratio = statistics.median(speeds["group"]) / statistics.median(speeds["by hand"])
    rows = [
        ["leader's time per step beside its engine, p50", f"{median:.0f} µs", f"≤{CONTROL_US} µs",
         _verdict(median <= CONTROL_US)],
        ["the same, p99", f"{p99:.0f} µs", f"≤{CONTROL_P99_US} µs",
         _verdict(p99 <= CONTROL_P99_US)],
        *([f"tokens/s, {side}", spread(found, digits=0), "", ""] for side, found in speeds.items()),
        ["of ranks in step by hand", f"{ratio:.2f}", f"≥{SHARE:g}", _verdict(ratio >= SHARE)],
    ]  # fmt: skip
    print(
        f"{ROWS} rows, {repeats} rounds; the control with the fake engine, {STEPS} steps a round\n"
    )
    print_table(["what", "measured", "target", "verdict"], rows)


def _verdict(is_kept: bool) -> str:
    return "kept" if is_kept else "MISSED"


def control_us() -> list[float]:
    """Return the microseconds that each step of a leader takes beside its engine's own."""
    own_s = 0.0
    plain = FakeEngine.step

    def timed(engine: FakeEngine) -> StepResult:
        nonlocal own_s
        began = time.perf_counter()
        result = plain(engine)
        own_s = time.perf_counter() - began
        return result

    group: Any = GroupEngine(make_spec(hosts=HOSTS, max_concurrency=ROWS), time.perf_counter, None)
    group.load(lambda phase, progress: None)
    _insert(group, WARM_UP + STEPS + 1)
    found = []
    with patch.object(FakeEngine, "step", timed):
        for _ in range(WARM_UP + STEPS):
            began = time.perf_counter()
            group.step()
            found.append(1e6 * (time.perf_counter() - began - own_s))
    group.close()
    return found[WARM_UP:]


def _insert(engine: Engine, tokens: int) -> None:
    for number in range(ROWS):
        row = Row(key=RequestKey(number + 1), tokens=[5, 6, 7, 8], max_tokens=tokens, seed=number,
                  ignore_eos=True)  # fmt: skip
        engine.insert(row)


def tokens_per_s(engine: Engine) -> float:
    """Have a loaded engine answer, and return how fast it did after a warm-up."""
    _insert(engine, WARM_UP + TOKENS)
    for _ in range(WARM_UP):
        engine.step()
    began = time.perf_counter()
    count = 0
    while engine.row_count():
        count += len(engine.step().tokens)
    return count / (time.perf_counter() - began)


def group_speed(path: Path) -> float:
    """Return the tokens per second of a group, measured in a process of its own."""
    return _in_process(_lead, str(path))


def _lead(path: str) -> float:
    group: Any = GroupEngine(_spec(path, HOSTS), time.perf_counter, None)
    group.load(lambda phase, progress: None)
    speed = tokens_per_s(group)
    group.close()
    return speed


def speed_by_hand(path: Path) -> float:
    """Return the tokens per second of two ranks that make the same calls and exchange nothing
    else."""
    addresses = (free_address("127.0.0.1"), free_address("127.0.0.1"))
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_keep_step, args=(1, addresses, str(path)))
    other.start()
    speed = _in_process(_keep_step, 0, addresses, str(path))
    other.join()
    return speed


def _keep_step(number: int, addresses: tuple[str, ...], path: str) -> float:
    spec = _spec(path, ())
    prepare(spec, gpu=0)
    rank = Rank(number=number, addresses=addresses, backend="ring")
    engine = open_engine(spec, time.perf_counter, rank=rank)
    engine.load(lambda phase, progress: None)
    return tokens_per_s(engine)


def _spec(path: str, hosts: Sequence[GroupHost]) -> Any:
    return make_spec(engine="mlx", path=path, hosts=tuple(hosts), max_concurrency=ROWS)


def _in_process(measure: Any, *arguments: object) -> float:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found: float = pool.apply(measure, arguments)
    return found
