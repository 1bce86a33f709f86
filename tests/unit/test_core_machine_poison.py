"""Poison among requests of all lengths: three crashes, and every innocent completes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsup.protocol.client_messages import Done, Failed
from mlxsup.protocol.states import FinishReason, State
from mlxsup.supervisor.core.health.blame import PROBATION_S
from mlxsup.supervisor.core.settings import CoreSettings, RestartSettings

from support.core_driver import LAUNCH, Driver, entry

CRASHES_OF_A_POISON = 3


class PoisonedEngine:
    """Plays one model's engine: each poison kills it when its answer reaches a certain token."""

    def __init__(self, rows: int, strikes: dict[str, int], lengths: dict[str, int]) -> None:
        launch = replace(LAUNCH, max_concurrency=rows)
        restart = RestartSettings(max_restarts=99, backoff_initial_s=0.1, backoff_max_s=0.1)
        limits = CoreSettings(max_queue=64, max_queue_per_client=64)
        self.driver = Driver([entry(launch=launch, restart=restart)], limits)
        self.strikes, self.lengths = strikes, lengths
        self.crashes: dict[str, int] = dict.fromkeys(strikes, 0)
        self.driver.load()
        self.driver.come_up()

    def run(self) -> None:
        """Steps until nothing is open."""
        while self.driver.core.ledger:
            running = list(self.driver.model().running.values())
            assert running, "everything waits and nothing runs"
            due = [r for r in running if self.strikes.get(r.id) == r.tokens_sent]
            if due:
                self.crashes[due[0].id] += 1
                self.driver.exit(signal="SIGSEGV")
                if self.driver.state() is State.BACKOFF:
                    self.driver.pass_time(0.2)
                assert self.driver.state() is not State.FAILED
                self.driver.come_up()
                continue
            self.driver.pass_time(PROBATION_S)
            for request in running:
                if request.acceptance is None:
                    self.driver.accept(request.key)
                is_last = request.tokens_sent + 1 == self.lengths[request.id]
                self.driver.token(request.key, finish=FinishReason.LENGTH if is_last else None)


@settings(max_examples=120, deadline=None)
@given(
    rows=st.integers(1, 8),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    poisons=st.dictionaries(st.integers(0, 7), st.integers(0, 11), max_size=2),
)
def test_a_poison_costs_three_crashes_and_every_innocent_completes_P10_F10(
    rows: int, lengths: list[int], poisons: dict[int, int]
) -> None:
    ids = [f"r{number}" for number in range(len(lengths))]
    strikes = {ids[n]: at for n, at in poisons.items() if n < len(ids) and at < lengths[n]}
    engine = PoisonedEngine(rows, strikes, dict(zip(ids, lengths, strict=True)))
    for id in ids:
        engine.driver.ask(id, body=id.encode())
    engine.run()
    for id in ids:
        end = engine.driver.end_of(id)
        if id in strikes:
            assert isinstance(end, Failed)
            assert end.error["code"] == "quarantined"
            assert engine.crashes[id] <= CRASHES_OF_A_POISON
        else:
            assert isinstance(end, Done)
            assert end.usage.completion_tokens == end.seq == engine.lengths[id]
    assert engine.driver.core.ledger.held_bytes == 0
