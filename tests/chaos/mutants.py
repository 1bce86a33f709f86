"""`python -m chaos.mutants [NAME …]`: plants bugs in a real daemon; the campaign has to see each.

The daemon and its workers are started with `sabotage` on their PYTHONPATH, where `sitecustomize`
has the import of one module read changed text; the campaign itself runs the product as it is.
Exits as every campaign does (`support.verdict`): 0 all seen, 4 one was not.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from .report import Report
from .run import run_chaos
from .setting import Setting, crowded_setting, fake_setting
from support.verdict import EXIT_CODES, Verdict

SABOTAGE = Path(__file__).parent / "sabotage"
VARIABLE = "MLXSUP_PLANTED"
REQUESTS = 2000
LEAST_OF_EACH = 20
"""Faults of each kind: whether a bug is seen must not depend on when they happen to strike."""
KILLS = ("SIGKILL", "SIGSEGV")
SERVING = "mlxsup.supervisor.core.serving"
ENDINGS = "mlxsup.supervisor.core.endings"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug.

    Attributes:
        name: what it does.
        module: where.
        right, wrong: the text, which is there once, and what is put in its place.
        check: the name of the check that sees it.
        kinds: the faults that bring it out.
        is_crowded: whether that takes models that do not fit together.
        is_single: whether that takes two faults at once in the same model.
    """

    name: str
    module: str
    right: str
    wrong: str
    check: str
    kinds: tuple[str, ...] = KILLS
    is_crowded: bool = False
    is_single: bool = False


MUTANTS = (
    Mutant(
        name="nothing is resumed",
        module=ENDINGS,
        right="    if request.acceptance is not None and not request.may_resume:\n"
        "        return worker_crashed(name, text, sent)",
        wrong="    if request.acceptance is not None:\n"
        "        return worker_crashed(name, text, sent)",
        check="unprovoked worker_crashed",
    ),
    Mutant(
        name="one death ends a request",
        module="mlxsup.supervisor.core.requests.ledger",
        right="MAX_DEATHS_WITHOUT_PROGRESS = 3",
        wrong="MAX_DEATHS_WITHOUT_PROGRESS = 1",
        check="unprovoked worker_crashed",
        kinds=("SIGKILL", "SIGTERM"),
    ),
    Mutant(
        name="everybody at the first crash is quarantined",
        module=ENDINGS,
        right="    if verdict.culprit == request.digest:\n        return quarantined(",
        wrong="    if verdict.evidence is Evidence.ACCUSES:\n        return quarantined(",
        check="unprovoked quarantined",
        kinds=("SIGSEGV", "SIGABRT"),
    ),
    Mutant(
        name="every Done is sent twice",
        module=ENDINGS,
        right="            message = _done(request, finish, ended)\n",
        wrong="            message = _done(request, finish, ended)\n"
        "            self._outbox.send(request.connection, message)\n",
        check="after the end",
    ),
    Mutant(
        name="a token of another model",
        module="mlxsup.worker.engines.fake.row",
        right="        return answer_token(self.digest, index, self.seed)",
        wrong="        other = bytes(len(self.digest))\n"
        "        return answer_token(other if index == 5 else self.digest, index, self.seed)",
        check="tokens",
    ),
    Mutant(
        name="a row's delta is dropped",
        module=SERVING,
        right="            if row.body:\n",
        wrong="            if row.body and request.tokens_sent != 5:\n",
        check="tokens",
    ),
    Mutant(
        name="a delta is lost on its way to the client",
        module=SERVING,
        right="            self._outbox.send(connection, Deltas(deltas=pieces))",
        wrong="            pieces = [piece for piece in pieces if piece.seq != 3]\n"
        "            self._outbox.send(connection, Deltas(deltas=pieces))",
        check="sequence",
    ),
    Mutant(
        name="text is lost",
        module=SERVING,
        right="tokens, row.body)",
        wrong='tokens, b"\\x80" if request.seq == 3 else row.body)',
        check="text",
    ),
    Mutant(
        name="usage is lost",
        module="mlxsup.supervisor.core.requests.ledger",
        right="            completion_tokens=self.tokens_sent,",
        wrong="            completion_tokens=0,",
        check="usage",
    ),
    Mutant(
        name="the seed is lost",
        module=ENDINGS,
        right="seed=request.acceptance.seed if request.acceptance else None",
        wrong="seed=None",
        check="seed",
    ),
    Mutant(
        name="a resume forgets what was delivered",
        module=SERVING,
        right="delivered=bytes(request.sent_tokens))",
        wrong="delivered=bytes(request.sent_tokens)[:-4])",
        check="tokens",
    ),
    Mutant(
        name="a cancel is taken for another's",
        module=ENDINGS,
        right="        self._withdraw(model, request, now)\n"
        "        self.end(request, finish=FinishReason.CANCELLED, now=now)",
        wrong="        request = next(iter(model.running.values()), request)\n"
        "        self._withdraw(model, request, now)\n"
        "        self.end(request, finish=FinishReason.CANCELLED, now=now)",
        check="cancel",
    ),
    Mutant(
        name="cancels are ignored",
        module=ENDINGS,
        right="        self._withdraw(model, request, now)\n"
        "        self.end(request, finish=FinishReason.CANCELLED, now=now)",
        wrong="        return",
        check="cancel",
    ),
    Mutant(
        name="deadlines come early",
        module=SERVING,
        right="    return now + limit_s if limit_s > 0 else None",
        wrong="    return now + limit_s / 2 if limit_s > 0 else None",
        check="unprovoked deadline_exceeded",
        kinds=("SIGKILL", "SIGSTOP"),
    ),
    Mutant(
        name="a restart waits for nobody",
        module="mlxsup.supervisor.core.lifecycle.on_command",
        right="    if trigger.is_immediate:\n"
        "        life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)\n"
        "    else:\n"
        "        life.drain(",
        wrong="    if True:\n"
        "        life.stop(StopCause.ASKED, now, stage=StopStage.ASK, is_restart=True)\n"
        "    else:\n"
        "        life.drain(",
        check="unprovoked worker_crashed",
        kinds=("restart", "reload"),
    ),
    Mutant(
        name="an unload cuts off what runs",
        module="mlxsup.supervisor.core.lifecycle.on_command",
        right="def down_when_ready(life: Life, phase: Ready, trigger: WantDown,"
        " now: float) -> None:\n",
        wrong="def down_when_ready(life: Life, phase: Ready, trigger: WantDown,"
        " now: float) -> None:\n"
        "    from .effects import RunningEnds\n\n"
        "    life.do(RunningEnds(error=cut_off(life.name, trigger.why)))\n",
        check="unprovoked unloaded",
        kinds=("unload",),
    ),
    Mutant(
        name="a poison is never quarantined",
        module="mlxsup.supervisor.core.health.blame",
        right="        if len(held) == 1 and self.is_due(held[0]):",
        wrong="        if False:",
        check="liveness",
        kinds=("poison",),
    ),
    Mutant(
        name="what runs out of memory takes all with it",
        module=ENDINGS,
        right="    if verdict.is_too_large:",
        wrong="    if verdict.evidence is Evidence.OUT_OF_MEMORY:",
        check="unprovoked insufficient_memory",
        kinds=("out of memory",),
    ),
    Mutant(
        name="a crash logs its traceback",
        module=ENDINGS,
        right="        again: list[Request] = []\n",
        wrong="        again: list[Request] = []\n"
        "        print('Traceback (most recent call last):', flush=True)\n",
        check="log",
        kinds=("SIGKILL",),
    ),
    Mutant(
        name="who is resumed stays paused",
        module="mlxsup.supervisor.core.pausing",
        right="        elif request.stage is Stage.PAUSED:\n"
        "            self.let_queue(model, request, now)",
        wrong="        elif request.stage is Stage.PAUSED:\n            pass",
        check="pause",
        kinds=("pause",),
    ),
    Mutant(
        name="pauses are not counted",
        module=SERVING,
        right="request.paused += request.is_paused",
        wrong="pass",
        check="paused",
        kinds=("pause",),
    ),
    Mutant(
        name="an unload ends answers that are paused",
        module=ENDINGS,
        right="            if is_served and request.is_paused:\n",
        wrong="            if False:\n",
        check="unprovoked unloaded",
        kinds=("pause", "unload"),
        is_single=True,
    ),
    Mutant(
        name="the budget is not what the configuration says",
        module="mlxsup.supervisor.memory.machine",
        right="        size_bytes=given_bytes,",
        wrong="        size_bytes=2 * given_bytes,",
        check="memory",
        kinds=("restart",),
        is_crowded=True,
    ),
    Mutant(
        name="loads are admitted without room",  # others go as soon as they are
        module="mlxsup.supervisor.core.memory.planner",
        right="    if wish.needed_bytes <= free_bytes:\n        return Admit()",
        wrong="    if True:\n        return Admit()",
        check="paused",
        kinds=("restart",),
        is_crowded=True,
    ),
    Mutant(
        name="pinned models are evicted",
        module="mlxsup.supervisor.core.residents",
        right="    if life.settings.pinned:\n        return Standing.PINNED",
        wrong="    if False:\n        return Standing.PINNED",
        check="pinned",
        kinds=("restart",),
        is_crowded=True,
    ),
    Mutant(
        name="models that run something are evicted",
        module="mlxsup.supervisor.core.residents",
        right="isinstance(phase, Ready) and model.is_idle else",
        wrong="isinstance(phase, Ready) else",
        check="unprovoked unloaded",
        kinds=("pause",),
        is_crowded=True,
    ),
)
QUICK = MUTANTS[:4]


def is_current(mutant: Mutant) -> bool:
    """Whether the text that it changes is still there, once."""
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text().count(mutant.right) == 1


def small(kinds: tuple[str, ...], *, is_crowded: bool = False) -> Setting:
    """The campaign with few kinds of faults, which come fast."""
    setting = crowded_setting() if is_crowded else replace(fake_setting(), askers=64)
    return replace(setting, kinds=kinds, pause_s=0.3, end_limit_s=60.0, run_limit_s=60.0)


def setting_for(mutant: Mutant) -> Setting:
    """The small campaign that brings this bug out."""
    setting = small(mutant.kinds, is_crowded=mutant.is_crowded)
    if mutant.is_single:
        name = next(iter(setting.models))
        setting = replace(setting, models={name: setting.models[name]})
    return replace(setting, requests_per_fault=REQUESTS // LEAST_OF_EACH)


def plant(mutant: Mutant, seed: int = 1) -> Report:
    """Runs the small campaign against a daemon with the bug."""
    planted = {"module": mutant.module, "right": mutant.right, "wrong": mutant.wrong}
    path = os.pathsep.join(filter(None, (str(SABOTAGE), os.environ.get("PYTHONPATH", ""))))
    environment = {"PYTHONPATH": path, VARIABLE: json.dumps(planted)}
    return run_chaos(setting_for(mutant), REQUESTS, seed, environment=environment)


def is_seen(mutant: Mutant, outcome: Report) -> bool:
    """Whether the campaign is red by the check that is meant for this bug."""
    return outcome.verdict is Verdict.MISSED and outcome.violations[mutant.check] > 0


def main() -> int:
    """Every bug, or those that are named."""
    parser = argparse.ArgumentParser(prog="chaos.mutants")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.names or m.name in given.names]
    unseen, stale = 0, [mutant.name for mutant in chosen if not is_current(mutant)]
    if stale:
        print(f"not shown: out of date: {', '.join(stale)}")
        return EXIT_CODES[Verdict.NOT_SHOWN]
    for mutant in chosen:
        outcome = plant(mutant)
        has_seen = is_seen(mutant, outcome)
        unseen += not has_seen
        print(f"{mutant.name}: {'seen by' if has_seen else 'NOT SEEN by'} {mutant.check!r}"
              f" ({outcome.lines[-1]})", flush=True)  # fmt: skip
    print(f"{len(chosen) - unseen} of {len(chosen)} planted bugs were seen")
    return EXIT_CODES[Verdict.MISSED if unseen else Verdict.KEPT]


if __name__ == "__main__":
    sys.exit(main())
