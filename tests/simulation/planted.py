"""The bugs that the simulation has to see: gross ones, crossings of a cancel, one per module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug.

    Attributes:
        name: what is broken, as the list prints it.
        module: of the core.
        right, wrong: the text, and what is put in the place of its first occurrence.
    """

    name: str
    module: str
    right: str
    wrong: str

    def plant(self, source: str) -> str:
        """The module's text with the bug.

        Raises:
            LookupError: the text is not there: this list is out of date.
        """
        if self.right not in source:
            raise LookupError(f"{self.name}: {self.module} does not contain {self.right!r}")
        return source.replace(self.right, self.wrong, 1)


def _m(name: str, module: str, right: str, wrong: str) -> Mutant:
    return Mutant(name=name, module=module, right=right, wrong=wrong)


GROSS = (
    _m("every request refused", "admission", "if life.state is State.FAILED:", "if True:"),
    _m("the queue is full from the start", "admission",
       "if ledger.waiting < settings.max_queue or", "if"),
    _m("the queue has no limit", "admission",
       "if waiting >= settings.max_queue_per_client:",
       "if False:"),
    _m("nothing ever resumed", "endings",
       "if request.acceptance is not None and not request.may_resume:\n        return worker",
       "if request.acceptance is not None:\n        return worker"),
    _m("resumed from its beginning", "serving", "delivered=bytes(request.sent_tokens)",
       'delivered=b""'),
    _m("resumed with the wish not to be", "endings",
       "if request.acceptance is not None and not request.may_resume:\n        return worker",
       "if False:\n        return worker"),
    _m("deaths without progress never end", "endings",
       "if request.deaths >= MAX_DEATHS_WITHOUT_PROGRESS:", "if False:"),
    _m("progress does not count", "serving", "request.deaths = 0", "pass"),
    _m("FAILED at the first crash", "lifecycle.restart_policy",
       "if len(self._crashes) > self.settings.max_restarts:", "if True:"),
    _m("being stable clears the restart window", "lifecycle.restart_policy",
       "self._in_a_row = 0\n\n    def clean", "self._in_a_row = 0\n        "
       "self._crashes.clear()\n\n    def clean"),
    _m("the restart window never ends", "lifecycle.restart_policy",
       "<= now - window_s", "<= now - 1e9"),
    _m("back-off never grows", "lifecycle.restart_policy", "2.0**exponent", "1.0"),
    _m("back-off has no limit", "lifecycle.restart_policy",
       ", self.settings.backoff_max_s)", ", 1e9)"),
    _m("back-off without jitter", "lifecycle.restart_policy",
       " * self.random.uniform(0.5, 1.0)", ""),
    _m("back-off of nothing", "lifecycle.restart_policy", "self.random.uniform(0.5, 1.0)", "0.0"),
    _m("being stable changes nothing", "lifecycle.restart_policy",
       "self._in_a_row = 0\n\n    def clean",
       "pass\n\n    def clean"),
    _m("every deadline due at once", "serving", "return now + limit_s if", "return now if"),
    _m("no deadline is ever due", "endings",
       "if request.deadline is not None and now >= request.deadline:", "if False:"),
    _m("no wait is ever too long", "requests.ledger",
       "if self.stage is Stage.QUEUED:\n            times",
       "if False:\n            times"),
    _m("busy models unloaded as idle", "model", "and idle_s > 0 and self.is_idle",
       "and idle_s > 0"),
    _m("idle models stay", "model", "and idle_s > 0 and self.is_idle", "and idle_s < 0"),
    _m("text lost", "serving", "text=row.text,", ""),
    _m("usage lost", "endings", "usage=request.usage(),", ""),
    _m("cached tokens of the last life", "serving",
       "if request.first_token_at is None:\n            request.first_token_at = now",
       "if True:\n            request.first_token_at = now"),
    _m("seed lost", "endings", "seed=request.acceptance.seed if request.acceptance else None,",
       ""),
    _m("warnings lost", "endings", "warnings=request.warnings,", ""),
    _m("logprobs lost", "serving", "logprobs=row.logprobs,", ""),
    _m("channel lost", "serving", "channel=row.channel,", ""),
    _m("resumes not counted", "serving", "request.resumed += 1", "pass"),
    _m("a kill from outside accuses", "lifecycle.on_exit",
       "if died.exit_code == ExitCode.STEP_ERROR or died", "if True or died"),
    _m("nobody is ever accused", "lifecycle.on_exit",
       "if died.exit_code == ExitCode.STEP_ERROR or died.signal_name in ACCUSING_SIGNALS:",
       "if False:"),
    _m("out of memory ignored", "lifecycle.on_exit", "if died.exit_code == ExitCode.OUT_OF_MEMORY:",
       "if False:"),
    _m("a kill over the limit taken for one from outside", "model",
       "return limit < max(self.life.footprint_bytes, reported)", "return False"),
    _m("what its beats say of its memory is not read", "model",
       "max(self.life.footprint_bytes, reported)", "self.life.footprint_bytes"),
    _m("as many rows after out of memory", "model",
       "return limit if self.blame.rows is None else min(limit, self.blame.rows)",
       "return limit"),
    _m("everybody convicted at the first crash", "health.blame",
       "if len(held) == 1 and self.is_due(held[0]):", "if True:"),
    _m("suspects never take turns", "health.blame",
       "suspect.is_on_probation = bool(suspect.places)", "pass"),
    _m("turns last for ever", "health.blame", "if one.tokens < place + PROBATION_TOKENS]", "]"),
    _m("turns in company", "suspects", "return None if model.held else turns.due[0]",
       "return turns.due[0]"),
    _m("newcomers wait for all turns", "suspects",
       "if model.lets_newcomers_in:", "if False:"),
    _m("a broken engine is never found", "health.blame",
       "if len(self._in_a_row) >= MAX_QUARANTINES_IN_A_ROW:", "if False:"),
    _m("quarantines stay in the status", "health.blame", "if now >= until]:", "if False]:"),
    _m("the quarantining crash counts", "lifecycle.on_exit", "elif not trigger.verdict.is_counted:",
       "elif False:"),
    _m("SIGTERM is the last resort", "lifecycle.on_process",
       "StopStage.KILL:\n            stage = StopStage.KILL",
       "StopStage.KILL:\n            stage = StopStage.TERM"),
    _m("killed without a word", "lifecycle.on_process",
       "stage=StopStage.ASK", "stage=StopStage.KILL"),
    _m("drains are cut short", "lifecycle.life",
       "ends_at=now + drain_s", "ends_at=now"),
    _m("drains never end", "lifecycle.states", "return self.ends_at", "return None"),
    _m("a process that cannot be ended is waited for", "fleet",
       "phase.is_last and model.life.pid is not None", "False"),
    _m("long prompts taken for stalls", "health.watchdog",
       "return self.progress_at + step_timeout_s + PREDICTIONS * self.predicted_s",
       "return self.progress_at + step_timeout_s"),
    _m("stalls are never found", "health.watchdog", "return Alarm.STUCK", "return Alarm.NONE"),
    _m("lost rows are never found", "health.watchdog",
       "if given and (self.lost or self._waits_in_vain(step_timeout_s)):", "if False:"),
    _m("dead connections are never found", "health.watchdog",
       "return Alarm.BROKEN if now >= self.unlinked_at + UNLINKED_S else Alarm.NONE",
       "return Alarm.NONE"),
    _m("dispatched over a dead connection", "model", "return not is_unlinked and", "return"),
    _m("load errors are tried for ever", "lifecycle.restart_policy",
       "and load_error == before", "and False"),
    _m("another version is a crash", "lifecycle.on_exit", "return ExitReason.VERSION",
       "return ExitReason.CRASH"),
    _m("the latest comes first", "requests.queue", "return next(iter(self))", "return [*self][-1]"),
    _m("reloads keep the old process", "lifecycle.on_command",
       "return is_other_launch or life.wanted is Wanted.GONE", "return False"),
    _m("a refused reload is not answered", "core",
       "self.outbox.fail(caller, bad_configuration(problems))", "pass"),
    _m("the second signal is ignored", "fleet",
       "if is_immediate and (was_stopping or", "if False and (was_stopping or"),
    _m("slow clients are kept", "client_events",
       "self._endings.fail(self._fleet.touched_by(request), request, error)", "pass"),
    _m("a load is answered at once", "lifecycle.on_command",
       "def up_joins(life: Life, phase: Phase, trigger: WantUp, now: float) -> None:\n",
       "def up_joins(life: Life, phase: Phase, trigger: WantUp, now: float) -> None:\n"
       "    life.do(UpWaitersEnd(error=None))\n"),
)  # fmt: skip
"""What users would notice at once."""

CROSSINGS = (
    _m("cancel × finish: its row is never free", "serving",
       "model.leaving.pop(row.key, None)\n                    has_freed", "has_freed"),
    _m("cancel × finish: its row is free before it has left", "endings",
       "model.leaving[request.key] = request.held", "pass"),
    _m("cancel × rejection: its row is never free", "serving",
       "model.leaving.pop(key, None)\n        request = model", "request = model"),
    _m("cancel × rejection: nobody to tell", "serving",
       "request = model.running.pop(key, None)", "request = model.running.pop(key)"),
    _m("cancel × exit: its row outlives the process", "model", "self.leaving.clear()", "pass"),
    _m("cancel × exit: who was cancelled is not accused", "model",
       ", *self.leaving.values()]", "]"),
    _m("cancel × restart: it waits on", "endings",
       "model.queue.leave(request.key)\n            return", "return"),
    _m("cancel × restart: it is taken for running", "endings",
       "self._ledger.move(request, Stage.QUEUED)\n        request.told.clear()",
       "request.told.clear()"),
    _m("cancel × turn: who leaves for a turn is cancelled", "serving",
       "and request.stage is Stage.YIELDING:", "and False:"),
)  # fmt: skip

MODULES = (
    _m("death_cause: none is known", "health.death_cause", "if exit_code == code:", "if False:"),
    _m("core: one request of a lost client stays", "client_events",
       "for request in self._serving.ledger.of_connection(event.connection):",
       "for request in self._serving.ledger.of_connection(event.connection)[1:]:"),
    _m("deadlines: none comes", "deadlines",
       "while (when := self.earliest()) is not None and when <= now:",
       "while (when := self.earliest()) is not None and when < now - 1e9:"),
    _m("on_exit: what ran is forgotten", "lifecycle.on_exit",
       "life.do(RunningLost(text=text, verdict=trigger.verdict))", "pass"),
    _m("queue: who waited again is forgotten", "requests.queue", "sorted([*keys, *self._again])",
       "sorted([*keys])"),
    _m("life: the pid stays", "lifecycle.life", "self.phase = phase\n        self.pid = None",
       "self.phase = phase"),
    _m("table: back-off has no end", "lifecycle.table", "Backoff, Due, on_process.retry",
       "Backoff, Due, on_process.nothing"),
    _m("loading: side by side", "loading", "if not is_any_loading and not turns:",
       "if not turns:"),
    _m("outbox: commands are not answered", "outbox",
       "self.send(caller.connection, Reply(id=caller.id, value=value))", "pass"),
    _m("fleet: who waits for a failed load waits on", "fleet",
       "self._endings.fail_queue(model, error)", "pass"),
    _m("states: asking is for ever", "lifecycle.states", "return self.escalates_at", "return None"),
    _m("errors: tokens_sent is wrong", "errors", '"cause": text, "tokens_sent": tokens_sent}',
       '"cause": text, "tokens_sent": tokens_sent + 1}'),
    _m("ledger: only the last tokens are kept", "requests.ledger", "request.sent_tokens += tokens",
       "request.sent_tokens = bytearray(tokens)"),
    _m("on_process: signals stay soft", "lifecycle.on_process", "life.tell_to_end(stage)",
       "pass"),
    _m("on_command: who waits is not answered", "lifecycle.on_command",
       "life.do(QueueEnds(error=cut_off(life.name, trigger.why)))\n    life.drain(",
       "life.drain("),
    _m("serving: gaps in the numbers", "serving", "request.seq += 1",
       "request.seq += request.resumed + 1"),
    _m("status: nobody waits", "status", '"queued": len(model.queue)', '"queued": 0'),
    _m("suspects: who is not due waits", "suspects",
       "return next((r for r in turns.waiting if r not in turns.due), None)", "return None"),
    _m("watchdog: stopped processes stay", "health.watchdog", "return Alarm.STOPPED",
       "return Alarm.NONE"),
    _m("worker_events: rejections are not read", "worker_events",
       "self._serving.rejected(model, message.key, error, now)", "pass"),
    _m("metering: nobody is charged", "metering", "request.engine_s += seconds", "pass"),
    _m("charging: what is read again is charged", "sharing.charging",
       "again = max(0.0, min(row.computed, read_before(row.key) - begin))", "again = 0.0"),
    _m("alike_steps: those that are alike cost nothing", "sharing.alike_steps",
       "max(self.took_s, 0.0)", "0.0"),
    _m("device_time: engines at once pay whole steps", "sharing.device_time",
       "return took_s * min(share, 1.0)", "return took_s"),
)  # fmt: skip
"""At least one for each module of the core, beside those above."""

FORGOTTEN = (
    _m("a restart leaves quarantines", "health.blame",
       "        self._quarantined.clear()\n        self._in_a_row.clear()",
       "        self._in_a_row.clear()"),
    _m("lowered rows never come back", "health.blame", "if now >= self._rows_until:", "if False:"),
    _m("ids are found over all connections", "requests.ledger",
       "return self._by_connection.get(connection, {}).get(id)",
       "return next((r for r in self if r.id == id), None)"),
    _m("the subscription of a lost client stays", "client_events",
       "self._outbox.subscriptions.pop(connection, None)\n        forgotten", "forgotten"),
    _m("load errors alike, with others between them", "lifecycle.restart_policy",
       "before, self._load_error = self._load_error, load_error",
       "before, self._load_error = self._load_error, load_error or self._load_error"),
    _m("the twin of a culprit waits on", "endings",
       "if request.digest == verdict.culprit:\n                    error",
       "if False:\n                    error"),
    _m("the time in the queue is that until the resume", "serving",
       "if request.acceptance is None:\n            request.started_at = now\n            return",
       "request.started_at = now\n        if request.acceptance is None:\n            return"),
    _m("the limit for the first token ends with a crash", "requests.ledger",
       "if self.first_token_at is None:\n            times.append",
       "if self.first_token_at is None and self.acceptance is None:\n"
       "            times.append"),
    _m("places in line count from 0", "requests.queue",
       "enumerate(islice(self, near), start=1)", "enumerate(islice(self, near), start=0)"),
    _m("rows that left between two steps pay", "sharing.charging",
       "step.rows[step.between_steps :] if step.between_steps > 0 else step.rows", "step.rows"),
    _m("what was known of a prompt is not free", "sharing.charging",
       "sum(row.computed for row in read)", "sum(row.done for row in read)"),
    _m("an error does not say what it cost", "endings", "if request.engine_s:", "if False:"),
    _m("an engine whose process is gone shares its device", "serving",
       "self._meter.rests(model, now)", "pass"),
    _m("who is cancelled does not pay for the latest steps", "endings",
       "model.settle()\n        del model.running[request.key]", "del model.running[request.key]"),
    _m("who begins makes what was before cheaper", "metering",
       "            model.settle()\n\n    def _device_of",
       "            pass\n\n    def _device_of"),
    _m("how far a prompt was read is forgotten", "metering", "request.read_tokens = row.done",
       "pass"),
)  # fmt: skip
"""State that outlives its cause or is lost with it, and what only equals can show."""

MUTANTS = GROSS + CROSSINGS + MODULES + FORGOTTEN
