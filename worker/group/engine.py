"""The engine of a leader: what its step loop asks of it, all ranks do."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from mlxsup.protocol.group import LOAD_LIMIT_S, OTHER_FILES, other_version
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import ExitCode, LaunchSpec
from mlxsup.protocol.states import LoadPhase
from mlxsup.protocol.text import size_text
from mlxsup.protocol.worker_messages import RankState

from ..engine import (
    BadLaunchError,
    BadModelError,
    Engine,
    EngineFacts,
    ModelFiles,
    Rank,
    ReportProgress,
    Row,
    StepResult,
)
from ..engines.fake.engine import Reach
from ..engines.opening import choose_backend, free_address, identify, open_engine, prepare
from .followers import Follower, Followers
from .frames import Call, Plan, pack_frame, plain_row
from .replay import Replay

MEMORY_LIMIT_S = LOAD_LIMIT_S + 5.0
"""A load waits so long for memory of a host, which an earlier rank may be about to free."""

OWN_BYTES = 2**29
"""A rank takes so much besides its share of the weights, at least."""

CHANGES = frozenset({"remove", "set_aside", "drop_kept", "free_kept", "give_back"})
"""Methods of `Engine` that change rows; all ranks make their calls."""

LOOK_S = 0.05
"""How often a load that waits for other ranks looks for an Exit of the supervisor."""


class GroupEngine:
    """See `Engine`. Each call that changes rows or runs a pass is sent to all followers and then
    made here, so that all ranks make the same calls in the same order.

    Followers decide nothing: seeds, limits and cancels are in the calls, and no rank's decisions
    depend on a clock, which for its engine stands still. Steps are timed around the engine.

    Args:
        spec: of the worker, with at least two hosts.
        clock: seconds that this process has worked.
        reach: see `open_engine`.
    """

    def __init__(self, spec: LaunchSpec, clock: Callable[[], float], reach: Reach | None) -> None:
        self._spec = spec
        self._clock = clock
        self._reach = reach
        self._followers = Followers(spec)
        self._engine: Engine | None = None
        self._replay: Replay | None = None
        self._warnings: list[str] = []
        self._decode_s = 0.0  # of the latest step that read no prompt

    def load(self, report: ReportProgress) -> EngineFacts:
        """See `Engine.load`; all ranks load, and none is READY before all are.

        Raises:
            BadLaunchError, BadModelError: a rank has other versions or files.
            Exception: what `Engine.load` raises.
        """

        def look() -> None:
            report(LoadPhase.IMPORT, 0.0)

        look()
        files = identify(self._spec)
        addresses = self._gather(files, look)
        prepare(self._spec, gpu=0)
        self._wait(lambda one: one.progress is not None, look)
        backend = choose_backend(self._spec)
        for number, one in enumerate(self._followers.ranks, 1):
            one.send(pack_frame(Plan(rank=number, addresses=addresses, backend=backend)))
        rank = Rank(number=0, addresses=tuple(addresses), backend=backend)
        spec = replace(self._spec, hosts=())
        self._engine = open_engine(spec, self._clock, reach=self._reach, rank=rank)
        facts = self._engine.load(self._report_slowest(report))
        self._wait(lambda one: one.loaded is not None, lambda: report(LoadPhase.WARMUP, 1.0))
        self._replay = Replay(self._engine, facts)
        self._call(
            "settle"
        )  # so that every rank knows that all have loaded, and found out the same
        return replace(facts, warnings=(*facts.warnings, *self._warnings))

    def _gather(self, files: ModelFiles, look: Callable[[], object]) -> list[str]:
        """Wait until every rank has said what it is, and return their addresses; ranks that are
        unreachable are left out if the others are enough.

        Args:
            files: of this host.
            look: called now and then.

        Raises:
            BadLaunchError, BadModelError: a rank cannot take part.
        """
        ranks = self._followers.ranks
        self._wait(lambda one: bool(one.greeting or one.unreachable), look)
        missing = [one for one in ranks if one.unreachable]
        size = 1 + len(ranks) - len(missing)
        needed_bytes = -(-files.weight_bytes // size) + OWN_BYTES
        for one in missing:
            is_enough = size >= (self._spec.min_hosts or len(self._spec.hosts))
            if not is_enough or psutil.virtual_memory().available < needed_bytes:
                self._followers.lose(ExitCode.RANK_LOST, one.unreachable)
            self._warnings.append(f"{one.unreachable}; the other hosts serve the model without it")
            ranks.remove(one)
            one.end()
        addresses = [free_address(self._spec.hosts[0].address)]
        for one in ranks:
            assert one.greeting is not None
            if said := other_version(one.greeting.versions, files.versions):
                raise BadLaunchError(f"{one} {said}")
            if one.greeting.fingerprint != files.fingerprint:
                raise BadModelError(f"{one} {OTHER_FILES}")
            addresses.append(one.greeting.address)
        # What an earlier life held there may still be about to be freed.
        self._wait(lambda one: one.available_bytes >= needed_bytes, look, limit_s=MEMORY_LIMIT_S)
        for one in ranks:
            if one.available_bytes < needed_bytes:
                raise BadLaunchError(
                    f"{one} has {size_text(one.available_bytes)} of memory free, but its share"
                    f" needs {size_text(needed_bytes)}; free some there, or add a host"
                )
        return addresses

    def ranks(self) -> list[RankState]:
        """Return the states of the other ranks, from rank 1; on any thread."""
        return [one.state() for one in self._followers.ranks]

    def _report_slowest(self, report: ReportProgress) -> ReportProgress:
        """Report progress, and wait before the first pass until every rank has its weights: a rank
        whose disk is slow must not look like one that hangs in that pass."""
        has_waited = False

        def reported(phase: LoadPhase, progress: float) -> None:
            nonlocal has_waited
            if phase is LoadPhase.WARMUP and not has_waited:
                has_waited = True
                self._wait(_has_weights, lambda: report(LoadPhase.MATERIALISE, self._slowest()))
            report(phase, progress)

        return reported

    def _slowest(self) -> float:
        told = [one.progress for one in self._followers.ranks]
        return min(one.progress for one in told if one is not None)

    def _wait(
        self,
        is_met: Callable[[Follower], bool],
        look: Callable[[], object],
        *,
        limit_s: float = math.inf,
    ) -> None:
        """Wait until something holds for all followers, or for so many seconds.

        Args:
            is_met: whether it holds for one.
            look: called now and then.
            limit_s: how long to wait at most.
        """
        began = self._clock()
        while not all(map(is_met, self._followers.ranks)) and self._clock() - began < limit_s:
            self._followers.news.wait(LOOK_S)
            self._followers.news.clear()
            look()

    # ------------------------------------------------------------ what all ranks do

    def _call(self, name: str, *keys: RequestKey, row: Row | None = None, **named: Any) -> Any:
        assert self._replay is not None
        is_constrained = row is not None and row.grammar is not None
        self._followers.send(
            Call(
                number=self._replay.number + 1,
                name=name,
                digest=self._replay.digest,
                row={} if row is None else plain_row(row),
                is_constrained=is_constrained,
                keys=list(keys),
                named=named,
            )
        )
        arguments = keys if row is None else [row]
        try:
            return self._replay.make(name, arguments, named, is_constrained=is_constrained)
        except Exception:
            self._followers.blame()
            raise

    def insert(self, row: Row) -> int:
        """See `Engine.insert`."""
        return int(self._call("insert", row=row))

    def step(self) -> StepResult:
        """See `Engine.step`."""
        return self._step("step")

    def decode(self) -> StepResult:
        """See `Engine.decode`."""
        return self._step("decode")

    def _step(self, name: str) -> StepResult:
        assert self._replay is not None
        began = self._clock()
        result: StepResult = self._call(name)
        result.took_s = self._clock() - began
        if not result.prefill:
            self._decode_s = result.took_s
        result.decode_s = min(self._decode_s, result.took_s) if result.tokens else 0.0
        # Followers have no grammars, so they do not see that one has ended its row.
        if over := [
            one.key
            for one in result.tokens
            if one.finish is not None and self._replay.is_constrained(one.key)
        ]:
            self._call("remove", *over)
        return result

    def settle(self) -> None:
        """Do nothing: the next call does it, in every rank."""

    def prepare(self) -> bool:
        """See `Engine.prepare`: there is nothing."""
        return False

    def close(self) -> None:
        """See `Engine.close`; every rank exits."""
        self._followers.stop()
        if self._engine is not None:
            self._engine.close()

    def __getattr__(self, name: str) -> Any:
        """Return another method of `Engine`; one that only asks is that of the leader's own."""
        return partial(self._call, name) if name in CHANGES else getattr(self._engine, name)


def _has_weights(follower: Follower) -> bool:
    progress = follower.progress
    return progress is not None and progress.phase is LoadPhase.WARMUP
