"""Every model, and how the transitions of their lives are carried out."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import assert_never

from mlxsup.protocol.errors import RemoteError
from mlxsup.protocol.flight import ModelChanged
from mlxsup.protocol.ids import Caller, ModelName
from mlxsup.protocol.states import HAS_PROCESS, SERVES, PauseReason, State, Wanted, Why
from mlxsup.protocol.text import size_text
from mlxsup.protocol.worker_messages import GiveBack, LogLevel

from .actions import (
    Abandon,
    BudgetChanged,
    ForgetModel,
    LogFault,
    LookAtFiles,
    NeedRaised,
    Outbox,
    SendToWorker,
    SetLogLevel,
    SignalWorker,
    Spawn,
)
from .budget import Need, Pressure, Reading, bounded, raised
from .downloads import Downloads
from .life import Life, StopCause
from .memory_plan import Plan, plan
from .memory_view import MemoryView, at_rest, loaded_models, takes_prewarmed, view_of
from .model import Model
from .prefill_slots import PrefillSlots
from .requests import Ledger, Queue, Request
from .serving import Serving
from .settings import CoreSettings, ModelSettings
from .status import change_map, model_row
from .transitions import (
    PROGRESS,
    Answer,
    Changed,
    Drained,
    Due,
    Faulted,
    ImpossibleTransitionError,
    Outcome,
    RowsLeave,
    RunningLost,
    Trigger,
    Turn,
    Waiters,
    WantDown,
    WantUp,
    apply,
    reload_command,
    words_of,
)
from .warm_pool import WarmPool

MOST_PASSES = 10
"""Over all models that wait for a load, in one event; each pass leaves less to do, and what one
model gives back may be enough for one before it."""


class Fleet:
    """The models by name; the only place in which a trigger meets a life.

    Args:
        models: every entry, in the order of the file.
        random: draws the jitter of restarts.
        is_strict: raise at an impossible transition.

    Attributes:
        outbox: the actions of the event being handled.
        machine_bytes: memory of the machine; 0 before it was measured.
        is_shutting_down: whether the daemon is ending, so that no model comes up.
        needs: what the models of the configuration were appraised at.
        ledger: the open requests, which `serving` moves.
        attaching: their streams that have more than one reader.
        prefill_slots: has models read long prompts in turns.
        warm_pool: processes that wait for a load.
        downloads: of what the models lack.
        ran_out: the model whose process has just run out of memory with one request, which is tried
            again; the next plan takes it. None: there is none.
    """

    def __init__(
        self,
        settings: CoreSettings,
        models: Sequence[ModelSettings],
        *,
        random: random.Random,
        is_strict: bool,
    ) -> None:
        self.outbox = outbox = Outbox()
        self.machine_bytes = 0
        self.is_shutting_down = False
        self.needs: Mapping[ModelName, Need] = {}
        # Bounded by the configuration: one entry for each model, until its removal is complete.
        self.by_name: dict[ModelName, Model] = {}
        self.ledger = Ledger(settings, outbox.deadlines)
        self.serving = Serving(self.ledger, outbox)
        self.attaching = self.serving.attaching
        self.prefill_slots = PrefillSlots(outbox)
        self.warm_pool = WarmPool(outbox)
        self.downloads = Downloads(outbox)
        self._random = random
        self._exit_grace_s = settings.exit_grace_s
        self._is_strict = is_strict
        self._pressure = Pressure()
        self._log_level: str | None = None  # None: as each worker was started
        self._is_plan_due = True
        self._is_division_due = False
        self.ran_out: ModelName | None = None
        # A dict because a set's order would change with the interpreter's hash seed (P22).
        self._touched: dict[ModelName, None] = {}
        for entry in models:
            self._add(entry)

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self.by_name.values()))

    @property
    def settings(self) -> CoreSettings:
        """Return the `[supervisor]` table as it was last read, with what there is of the budget
        now."""
        return self.ledger.terms.settings

    def touch(self, model: Model) -> None:
        """Something about this model changed: `run_policies` looks at it."""
        self._touched[model.name] = None

    def touched_by(self, request: Request) -> Model:
        """Return the model of a request that something is done about; `run_policies`
        looks at it."""
        model = self.by_name[request.model]
        self.touch(model)
        return model

    def look_at_all(self) -> None:
        """Have all models looked at: the budget, or what the warm pool holds, has changed."""
        self._is_plan_due = True
        for model in self:
            self.touch(model)

    def memory_changed(self) -> None:
        """Something has changed that the memory plan depends on."""
        self._is_plan_due = self._is_division_due = True

    def has_processes(self) -> bool:
        """True if any process whose end must be waited for is alive."""
        return any(model.life.state in HAS_PROCESS for model in self)

    def end_limit_s(self) -> float:
        """Return how long it may take to end every process once nothing is left to drain."""
        limits = [model.life.kill_limit_s for model in self if model.life.state in HAS_PROCESS]
        return 2 * self._exit_grace_s + max(limits) if limits else 0.0

    def overshoot_bytes(self, now: float) -> int:
        """Return how much of what is reserved must still go, of any model that may."""
        loaded = {one.name: one for one in loaded_models(self, self.settings, now)}
        return MemoryView(budget=self.settings.budget, now=now, loaded=loaded).overshoot_bytes

    # ------------------------------------------------------------ all models at once

    def preload(self, now: float) -> None:
        """Load what the configuration wants loaded, once the supervisor is up."""
        for model in self:
            if model.life.settings.preload:
                self.trigger(model, WantUp(why=Why.PRELOAD), now)

    def reload(self, settings: CoreSettings, models: Sequence[ModelSettings], now: float) -> None:
        """Remove, add and change models: the configuration was read again."""
        budget = self._pressure.after_reload(self.settings.budget, settings.budget)
        if settings.log_level != self.settings.log_level:
            self._change_log_level(settings.log_level)
        self.ledger.terms.settings = replace(settings, budget=budget)
        drain_s = settings.drain_timeout_s
        entries = {entry.name: entry for entry in models}
        for model in self:
            if model.name not in entries and model.life.wanted is not Wanted.GONE:
                self.trigger(model, reload_command(model.name, entries, drain_s), now)
        for entry in models:
            known = self.by_name.get(entry.name)
            if known is not None:
                if known.life.settings != entry:
                    known.blame.lift()
                self.trigger(known, reload_command(known.name, entries, drain_s), now)
            else:
                added = self._add(entry)
                if entry.preload:
                    self.trigger(added, WantUp(why=Why.RELOAD), now)
        in_order = {entry.name: self.by_name[entry.name] for entry in models}
        self.by_name = in_order | {m.name: m for m in self if m.name not in in_order}

    def ended_by(self, entries: Sequence[ModelSettings]) -> bool:
        """True if a reload with these entries would end, now or once it is idle, the process of a
        model."""
        launches = {entry.name: entry.launch for entry in entries}
        return any(
            model.life.has_process and launches.get(model.name) != model.life.settings.launch
            for model in self
            if model.life.wanted is not Wanted.GONE
        )

    def shut_down(self, now: float, *, is_immediate: bool, drain_s: float) -> None:
        """End every process, and start none again.

        Args:
            is_immediate: without letting running requests finish.
            drain_s: otherwise, how long they may take.
        """
        self.is_shutting_down = True
        for model in self:
            was_stopping = model.life.state is State.STOPPING
            # Including one that a reload is removing: its drain may have a longer limit.
            self.trigger(model, WantDown(why=Why.SHUTDOWN, drain_s=drain_s), now)
            if is_immediate and (was_stopping or model.life.state is State.DRAINING):
                self.trigger(model, Due(), now)

    # ------------------------------------------------------------ one model

    def trigger(self, model: Model, trigger: Trigger, now: float) -> None:
        """Apply a trigger to a model's life and carry out what follows.

        Raises:
            ImpossibleTransitionError: the state has no case for it, if this is strict; otherwise
                that one life ends as FAILED(internal), and the story is logged.
        """
        self.touch(model)
        if not isinstance(trigger, PROGRESS):
            self.memory_changed()
        before, story = model.life.state, model.life.story
        try:
            outcomes = apply(model.life, trigger, now)
        except ImpossibleTransitionError as error:
            if self._is_strict:
                raise
            story.append(f"{now:.3f} {before} {words_of(trigger)} !")
            if before in HAS_PROCESS:
                self.fault(model, StopCause.INTERNAL, f"internal error: {error}", now)
            self.outbox.add(LogFault(model=model.name, story=tuple(story)))
            return
        story.append(f"{now:.3f} {before} {words_of(trigger)} → {model.life.state}")
        for outcome in outcomes:
            self._carry_out(model, outcome, before, now)
        if model.life.state is State.STOPPED and before is not State.STOPPED:
            model.keep_alive_s = None  # it was said of the turn that is over

    def fault(self, model: Model, cause: StopCause, detail: str, now: float) -> None:
        """End the process of a model for what it did, or did not do."""
        self.trigger(model, Faulted(cause=cause, detail=detail), now)

    def announce(self, model: Model, note: str, before: State | None = None) -> None:
        """Notify all who watch of a change of a model; `before` is its state if that was another
        one."""
        self.outbox.announce(change_map(model, note, before))

    def look_at_files(self, model: Model) -> None:
        """Have the shell compare the files of a model with those that its process has loaded; until
        it answers, the model stays."""
        model.life.files = replace(model.life.files, is_being_seen=True)
        self.outbox.add(LookAtFiles(model=model.name, generation=model.life.generation))

    def squeeze(self, reading: Reading | None, now: float) -> None:
        """Give the models what the other programs leave of the budget."""
        before = self.settings.budget
        if before is None:
            return
        held_bytes = sum(model.held_bytes for model in self)
        budget = self._pressure.sampled(before, reading, held_bytes, now)
        if budget != before:
            self.ledger.terms.settings = replace(self.settings, budget=budget)
            self.look_at_all()
        if budget.size_bytes != before.size_bytes:
            self.outbox.add(BudgetChanged(budget=budget))

    def settle_warm_pool(self, now: float) -> None:
        """Start a prewarmed worker if it is missing and nothing loads; end those that are too
        many."""
        loaded = loaded_models(self, self.settings, now)
        self.warm_pool.settle(
            self.settings,
            now,
            is_of_use=not self.is_shutting_down and any(takes_prewarmed(one) for one in self),
            is_held_up=any(one.life.is_loading or one.is_about_to_load for one in self),
            reserved_bytes=sum(model.life.reserved_bytes for model in self),
            needed_bytes=sum(one.least_bytes for one in loaded),
        )

    # ------------------------------------------------------------ what models need

    def appraised(self, needs: Mapping[ModelName, Need]) -> None:
        """Replace what was known of the needs of models: the shell has appraised them."""
        self.needs = needs
        self.appraise()

    def needs_now(self, name: ModelName, need: Need | None) -> None:
        """Plan with another need of one model; None: it is not known."""
        needs = {**self.needs, name: need}  # in the order of the configuration, as before
        self.needs = {one: known for one, known in needs.items() if known is not None}
        self.appraise()

    def raise_need(self, model: Model, now: float) -> None:
        """Reserve more for the next process of a model: this one has run out of memory. What it
        held must still be known, and what stays reserved follows from the need."""
        need = model.life.need
        if need is None or model.life.is_outdated or model.name not in self.needs:
            return  # or its files cannot be read, or a reload has removed it
        held_bytes = model.measured_bytes - model.process.reusable_bytes
        higher = raised(need, planned_bytes=model.planned_bytes, held_bytes=held_bytes)
        if higher.raised_bytes == need.raised_bytes:
            return
        launch, raised_bytes = model.life.launch, higher.raised_bytes
        self.needs_now(model.name, replace(self.needs[model.name], raised_bytes=raised_bytes))
        self.outbox.add(NeedRaised(model=model.name, launch=launch, raised_bytes=raised_bytes))
        note = (
            f"it ran out of memory, so a load now reserves {size_text(higher.needed_bytes)}, "
            f"which is {size_text(higher.raise_for(0))} more than estimated"
        )
        model.life.story.append(f"{now:.3f} {note}")
        self.announce(model, note)

    def appraise(self) -> None:
        """Plan anew, because the needs, the budget, or who is pinned has changed."""
        needs, budget = self.needs, self.settings.budget
        if budget is not None:
            pinned = {model.name for model in self if model.life.settings.pinned}
            needs = bounded(needs, pinned, budget.whole_bytes)
        self.memory_changed()
        for model in self:
            model.life.appraise(needs.get(model.name))
            self.touch(model)

    # ------------------------------------------------------------ how much workers log

    def _change_log_level(self, level: str) -> None:
        """Have the daemon and the workers log from this level on."""
        self._log_level = level
        self.outbox.add(SetLogLevel(level=level))
        for model in self:
            self.tell_log_level(model)

    def tell_log_level(self, model: Model) -> None:
        """Tell a worker that may have become READY the level: it may have been started before."""
        if self._log_level is not None and model.life.state in SERVES:
            self.outbox.tell(model, LogLevel(level=self._log_level))

    # ------------------------------------------------------------ after every event

    def run_policies(self, now: float) -> None:
        """Do what follows for every model that was touched."""
        if self._touched:
            self._end_drains(now)
        if self.ledger.has_freed:  # others of its client may wait for other models
            self.ledger.has_freed = False
            for any_model in self:
                self.touch(any_model)
        if self._touched or self._is_division_due:
            self._plan_memory(now)
            most = self.settings.max_parallel_prefills
            for reader in self.prefill_slots.settle(self.by_name, self._touched, most, now):
                self.serving.got_lease(reader, now)
                self.touch(reader)
            while self._touched:
                touched, self._touched = self._touched, {}
                for model in [self.by_name[name] for name in touched if name in self.by_name]:
                    self.serving.dispatch(model, now)
                    self.serving.tell_waiting(model, now)
                    self.outbox.deadlines.set(model.name, self.prefill_slots.deadline(model))
                if self.ledger.has_filled:  # whose turn or return it was must wait
                    self.ledger.has_filled = False
                    for one in self:
                        if one.blame.is_anyone_on_probation or one.batch.held_back is not None:
                            self.touch(one)

    def _plan_memory(self, now: float) -> None:
        """Have models load, and go, whose turn it is, download what is lacking, and divide what is
        free among the rows of those that serve.

        That depends on the states of models, on what is reserved for each, on the warm pool and on
        the budget. If no model waits or makes room, and no more is reserved than there is, this is
        so until one of these changes; requests that come and go change none of them.
        """
        if not (self._is_division_due or (self._touched and self._is_plan_due)):
            return
        for name in self._touched:
            model = self.by_name.get(name)
            if model is None:
                continue
            model.has_settled_in(now)  # a row that had to gain a token may have ended
            if model.life.state is State.PENDING:
                model.life.stream_tokens = model.longest_stream
        models = self.by_name.values()
        for name, progress in self.downloads.settle(model.life for model in models):
            self.trigger(self.by_name[name], progress, now)
        for _ in range(MOST_PASSES):
            if not self._is_division_due and at_rest(models, self.warm_pool, self.settings.budget):
                break
            view = view_of(
                models,
                self.warm_pool,
                self.settings,
                now,
                ran_out=self.ran_out,
                is_division_due=self._is_division_due,
            )
            self.ran_out = None
            found = plan(view)
            self._carry_out_plan(found, now)
            if not (found.steps or found.shed):
                self._is_division_due = False
                break
            self._end_drains(now)  # of models that were evicted
        self._is_plan_due = not at_rest(models, self.warm_pool, self.settings.budget)

    def _carry_out_plan(self, found: Plan, now: float) -> None:
        for name, note in found.reclaimed:
            model = self.by_name[name]
            model.process.asked_back_at = now
            self.outbox.tell(model, GiveBack())
            if note:
                self.announce(model, note)
        if found.ended:
            self.warm_pool.end(found.ended, now)
        for name, trigger in found.steps:
            if isinstance(trigger, Turn) and trigger.prewarmed is not None:
                self.warm_pool.hand_over(trigger.prewarmed)
            self.trigger(self.by_name[name], trigger, now)
        for name in found.doubted:
            self.look_at_files(self.by_name[name])
        for name, keys, note in found.shed:
            model = self.by_name[name]
            self.touch(model)
            self.memory_changed()
            self.serving.ask_rows_to_leave(model, PauseReason.MEMORY, keys)
            self.announce(model, note)
        for part in found.parts:
            model = self.by_name[part.name]
            message = model.adopt(part)
            if message is not None:
                self.outbox.tell(model, message)
            if model.queue:  # its rows may take more, or could
                self.touch(model)

    def _end_drains(self, now: float) -> None:
        for model in [self.by_name[name] for name in self._touched if name in self.by_name]:
            if model.life.state is State.DRAINING and model.has_drained:
                self.trigger(model, Drained(), now)

    def check_invariants(self) -> None:
        """Raise AssertionError if the models contradict themselves or each other."""
        for model in self:
            model.check_invariants()
            self._check_waiting(model)
        placed = [
            one.key
            for model in self
            for one in (*model.queue, *model.paused.values(), *model.batch.running.values())
        ]
        assert sorted(placed) == sorted(request.key for request in self.ledger)
        if self.is_shutting_down:
            assert all(model.life.wanted is not Wanted.UP for model in self)
            assert self.ledger.waiting == 0
        self.downloads.check_invariants(model.life for model in self)
        self.prefill_slots.check_invariants(self)

    # ------------------------------------------------------------ inside

    def _check_waiting(self, model: Model) -> None:
        """Raise AssertionError if a request waits without need."""
        waiting = model.queue.startable
        if model.life.state is not State.READY or not waiting or not model.has_room:
            return
        if model.batch.held_back is not None:
            assert model.batch.held_back in model.queue, f"{model.name} waits for one that is gone"
            assert model.batch.budget is not None, f"{model.name} has no budget and holds back"
            return
        assert model.batch.held, f"{model.name} has room and lets requests wait"
        held = [*model.batch.held, *(request.held for request in waiting)]
        assert any(model.blame.is_due(one) for one in held), "no turn is due"

    def _add(self, entry: ModelSettings) -> Model:
        """Add a model that was never started."""
        life = Life.new(entry, exit_grace_s=self._exit_grace_s, random=self._random)
        life.appraise(self.needs.get(entry.name))
        model = Model(name=entry.name, life=life, queue=Queue(self.ledger))
        return self.by_name.setdefault(entry.name, model)

    def _carry_out(self, model: Model, outcome: Outcome, before: State, now: float) -> None:
        match outcome:
            case Changed(note=note):
                if before is not model.life.state:
                    self.outbox.record(
                        ModelChanged(
                            model=model.name,
                            generation=model.life.generation,
                            before=before.value,
                            after=model.life.state.value,
                            why=model.life.why.value,
                            note=note,
                        )
                    )
                self.announce(model, note, before)
            case Answer(waiters=waiters, error=error):
                self._answer(model, waiters, error, now)
            case RowsLeave():
                self.serving.ask_rows_to_leave(model, PauseReason.SWAP)
            case RunningLost():
                self.serving.lose_worker(model, outcome.text, outcome.verdict, now)
                model.forget_process()
            case ForgetModel():
                self.outbox.add(outcome)
                del self.by_name[model.name]
            case SendToWorker(message=message):
                self.outbox.tell(model, message)
            case Spawn() | SignalWorker() | Abandon():
                self.outbox.add(outcome)
            case _:
                assert_never(outcome)

    def _answer(
        self, model: Model, waiters: Waiters, error: RemoteError | None, now: float
    ) -> None:
        callers: list[Caller] = []
        match waiters:
            case Waiters.CALLERS_UP:
                callers = model.up_callers
            case Waiters.CALLERS_DOWN:
                callers = model.down_callers
            case Waiters.QUEUE:
                assert error is not None
                self.serving.fail_queue(model, error, now)
            case Waiters.RUNNING:
                assert error is not None
                self.serving.fail_running(model, error, now)
        for caller in callers:
            if error is None:
                self.outbox.reply(caller, {"model": model_row(model, now)})
            else:
                self.outbox.fail(caller, error)
        callers.clear()


# ---------------------------------------------------------------- models
