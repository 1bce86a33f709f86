"""Fair-share accounting: on whose behalf a request is, what that is granted, what one engine step
costs, and who pays it, in engine seconds (docs/decisions/0005-fairness.md).

Names can be invented and connections multiplied, so a name counts only if `[clients]` lists it;
otherwise the process behind the connection is the account, or its terminal session for requests
that name `terminal`.

The share of an account of one model is engine seconds over its weight. After Sheng et al.,
"Fairness in Serving Large Language Models" (OSDI 2024), who count tokens: the account with the
smallest counter is next, and idleness earns no credit, because an account joins the line at its
floor.

While several engines work on a device, each is given an equal part of each moment. To intersect
their steps would miss half of the overlap, because the step that another engine is making has not
been reported yet. Steps that differ in nothing are charged together, so that one of them costs an
addition.

What is computed again after a crash or a pause is recognised by its place in the prompt and not by
its cause: tokens before the mark up to which any process has read are repeated, and free.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NewType, Protocol

from mlxsup.protocol.ids import ConnectionId, RequestKey
from mlxsup.protocol.worker_messages import Step

from .settings import ANYONE, ClientSettings, CoreSettings

Account = NewType("Account", str)
"""A name that `[clients]` lists, or else the process behind a connection."""

_UNLISTED = ClientSettings()


def process_name(pid: int, start: str | int) -> str:
    """Return the name of the process behind a connection, whose pid another one may get later."""
    return f"{_beginning(pid)}{start}"


def _beginning(pid: int) -> str:
    return f"process {pid}@"


class Terms:
    """The terms of each account, by the configuration.

    Attributes:
        settings: as they were last read, with what there is of the memory budget now.
        gateway_pid: the process through which HTTP requests come, which `gateway.py` notes; None:
            none listens. Without keys it is one account on behalf of many clients.
    """

    def __init__(self, settings: CoreSettings) -> None:
        self.settings = settings
        self.gateway_pid: int | None = None

    def of(self, account: Account) -> ClientSettings:
        """Return what the account is granted: its own table, or else that of all others."""
        clients = self.settings.clients
        return clients.get(account) or clients.get(ANYONE, _UNLISTED)

    def most_waiting(self, account: Account) -> int:
        """Return how many requests of an account may wait; those of HTTP without a key leave room
        for one more client."""
        if own := self.of(account).max_queue:
            return own
        settings, most = self.settings, self.settings.max_queue_per_client
        if self.gateway_pid is not None and account.startswith(_beginning(self.gateway_pid)):
            most = max(most, settings.max_queue - most)
        return most

    def account(self, client: str | None, process: str, connection: ConnectionId) -> Account:
        """On whose behalf a request is.

        Names are only believed if the configuration lists them: with invented ones, or with
        many connections, a process would otherwise get the places and the share of many.

        Args:
            process: the process behind its connection, as the shell names it; empty if it could
                not be found, in which case the connection is the account.
        """
        if client is not None and client != ANYONE and client in self.settings.clients:
            return Account(client)
        return Account(process or f"connection {connection.hex()}")

    def table_of(self, account: Account) -> str:
        """Return the table of the configuration that grants an account what it has:
        `clients.NAME`."""
        return f"clients.{account}" if account in self.settings.clients else f'clients."{ANYONE}"'


MAX_ACCOUNTS = 4096
"""At most this many absent accounts are remembered; the least debt is forgotten first."""

COST_WEIGHT = 0.2
"""The weight of a new measurement in the running estimate of what a request costs."""

UNKNOWN_COST_S = 1.0
"""Engine seconds that a request is expected to cost before any has been measured."""


class Counters:
    """The counters of one model. A counter never falls while its account waits or runs.

    Attributes:
        cost_s: engine seconds of a whole request, estimated from earlier ones; None before any
            has ended.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.cost_s: float | None = None
        # Bounded: MAX_ACCOUNTS, and those that wait or run.
        self._of: dict[Account, float] = {}
        self._latest: Account | None = None

    def __len__(self) -> int:
        return len(self._of)

    def of(self, account: Account) -> float:
        """Return an account's counter, in engine seconds over its weight."""
        return self._of.get(account, 0.0)

    def expected(self, account: Account) -> float:
        """Return by how much one more request is expected to raise an account's counter."""
        cost_s = UNKNOWN_COST_S if self.cost_s is None else self.cost_s
        return cost_s / self.terms.of(account).weight

    def join(self, account: Account, present: Collection[Account]) -> None:
        """Let an account come that neither waits nor runs: idleness has earned it no credit.

        Args:
            present: the accounts that wait or run.
        """
        floor = self._floor(present)
        self._of[account] = max(self._of.get(account, floor), floor)
        if len(self._of) > MAX_ACCOUNTS + len(present) + 1:
            self._forget({*present, account, self._latest})

    def dispatched(self, account: Account) -> None:
        """Note that a request of this account was dispatched."""
        self._latest = account

    def charge(self, account: Account, engine_s: float) -> None:
        """Charge an account so much of the engine's time."""
        self._of[account] = self.of(account) + engine_s / self.terms.of(account).weight

    def learn(self, engine_s: float) -> None:
        """Learn what a request cost that has run to its end."""
        before_s = engine_s if self.cost_s is None else self.cost_s
        self.cost_s = before_s + COST_WEIGHT * (engine_s - before_s)

    def _floor(self, present: Collection[Account]) -> float:
        if present:
            return min(map(self.of, present))
        return 0.0 if self._latest is None else self.of(self._latest)

    def _forget(self, kept: Collection[Account | None]) -> None:
        """Forget the smallest counters, an eighth at once, so that it is rarely looked for."""
        absent = [account for account in self._of if account not in kept]
        excess = len(absent) - MAX_ACCOUNTS + MAX_ACCOUNTS // 8
        for account in heapq.nsmallest(excess, absent, key=self.of):
            del self._of[account]


# ---------------------------------------------------------------- what a request costs


@dataclass(slots=True, kw_only=True)
class Cost:
    """The cost of a request.

    Attributes:
        engine_s: engine seconds charged so far.
        tokenize_s, prefill_s: how long its prompt took, in seconds.
        cached_tokens: how much of its prompt was in a cache.
        drafted, draft_accepted: how many tokens its row has guessed, and how many of them it drew.
        read_tokens: how many tokens of its prompt have been read, by the process that got furthest.
        first_token_at: monotonic seconds; None: it has no token yet.
        acceptance_bytes: about how large its acceptance is: prompt, tools, a schema.
    """

    engine_s: float = 0.0
    tokenize_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    drafted: int = 0
    draft_accepted: int = 0
    read_tokens: int = 0
    first_token_at: float | None = None
    acceptance_bytes: int = 0


class Payer(Protocol):
    """A request, as far as steps are charged to it."""

    @property
    def account(self) -> Account:
        """Return on whose behalf it is."""

    @property
    def cost(self) -> Cost:
        """Return what it has cost."""

    @property
    def computed_tokens(self) -> float:
        """Return how many tokens of its prompt and its answer have been computed, in any process;
        infinity for all of them."""


class DeviceTime:
    """The time of one device, and which engines work there.

    An engine works from the first request that it accepts until it holds none: then its steps
    follow each other without a gap, and a step of another engine meets one of its own, whether
    that has been heard of yet or not. While n engines work, each is given 1/n of the time.
    """

    def __init__(self) -> None:
        # When an engine began or rested last, and what one that has worked all the time had been
        # given until then.
        self._at = 0.0
        self._given_s = 0.0
        # When each working engine was last heard of, and the same for that moment.
        self._heard: dict[Meter, tuple[float, float]] = {}

    def works(self, engine: Meter, now: float) -> None:
        """Note that an engine has something to do; it may have been at work before."""
        if engine not in self._heard:
            self._changes(now)
            self._heard[engine] = now, self._given_s

    def rests(self, engine: Meter, now: float) -> None:
        """Note that an engine has nothing to do, or is gone."""
        if engine in self._heard:
            self._changes(now)
            del self._heard[engine]

    def cost_s(self, engine: Meter, took_s: float, at: float) -> float:
        """Return what the steps of a working engine cost since it was last heard of:
        their duration, of which each moment counts as much as the engine was given of it.

        Args:
            at: when the last of them was heard of, in monotonic seconds; since then no engine has
                begun or rested.
        """
        heard_at, before_s = self._heard[engine]
        given_s = self._given_until(at)
        passed_s = at - heard_at
        share = (given_s - before_s) / passed_s if passed_s > 0 else 1 / len(self._heard)
        self._heard[engine] = at, given_s
        return max(took_s, 0.0) * min(share, 1.0)

    def _changes(self, now: float) -> None:
        """Charge what all engines have done before their number, and so the price of a second,
        changes."""
        for engine in self._heard:
            engine.settle()
        if self._heard:
            self._given_s = self._given_until(now)
        self._at = now

    def _given_until(self, now: float) -> float:
        return self._given_s + (now - self._at) / len(self._heard)


@dataclass(slots=True, kw_only=True)
class _AlikeSteps:
    """Steps of one engine in a row that decoded the same rows, read no prompt and ended nothing,
    while the same engines worked; not frozen, because each step is added to it.

    Attributes:
        payers: the requests of the rows that have not ended.
        keys: of the rows that each step decoded, in order, those of ended requests included.
        took_s: seconds of all of them.
        at: when the last was heard of, in monotonic seconds.
    """

    payers: list[Payer]
    keys: list[RequestKey]
    took_s: float = 0.0
    at: float


class Meter:
    """The engine seconds of one model: charges its steps at once, or together as long as they
    differ in nothing.

    Attributes:
        device: where its engine computes; says nothing before the model is READY.
        engine_s: what was charged to requests, since the supervisor's start.
        repeated_s: what was spent on tokens that had been computed before and were lost.
    """

    def __init__(self, counters: Counters) -> None:
        self.device = DeviceTime()
        self.engine_s = 0.0
        self.repeated_s = 0.0
        self._counters = counters
        self._alike: _AlikeSteps | None = None

    def works(self, now: float) -> None:
        """Note that the engine has accepted a request, or got its lease; it may have been at work
        before."""
        self.device.works(self, now)

    def rests(self, now: float) -> None:
        """Note that the engine holds no request any longer or waits for a lease, or its process is
        gone."""
        self.device.rests(self, now)

    def add(self, step: Step, running: Mapping[RequestKey, Payer], now: float) -> None:
        """Charge a step of an engine that holds rows, now or with those after it; nothing of it has
        changed a request yet."""
        alike = self._alike
        if (
            alike is not None
            and [row.key for row in step.rows] == alike.keys
            and not step.prefill
            and not step.between_steps
        ):
            alike.took_s += step.took_s
            alike.at = now
        else:
            self._charge(step, running, now)

    def settle(self) -> None:
        """Charge what has not been charged yet: before a request leaves, and before the charges are
        read."""
        alike, self._alike = self._alike, None
        if alike is None:
            return
        cost_s = self.device.cost_s(self, alike.took_s, alike.at)
        self.engine_s += cost_s
        for request in alike.payers:  # each row pays an equal part
            self._pay(request, cost_s / len(alike.keys))

    def _charge(self, step: Step, running: Mapping[RequestKey, Payer], now: float) -> None:
        self.settle()
        self.works(now)
        cost_s = self.device.cost_s(self, step.took_s, now)
        read_before = {
            row.key: running[row.key].computed_tokens for row in step.prefill if row.key in running
        }
        paid, repeated_s = charge(step, cost_s, read_before)
        for key, seconds in paid.items():
            if key in running:
                self._pay(running[key], seconds)
        for row in step.prefill:
            if row.key in running:
                cost = running[row.key].cost
                cost.read_tokens = max(cost.read_tokens, row.done)
        self.engine_s += sum(paid.values())
        self.repeated_s += repeated_s
        keys = [row.key for row in step.rows]
        are_all = keys and len(keys) == len(paid)
        if are_all and not step.prefill and not step.between_steps:
            payers = [running[key] for key in paid if key in running]
            self._alike = _AlikeSteps(payers=payers, keys=keys, at=now)

    def _pay(self, request: Payer, engine_s: float) -> None:
        """Charge a request, and its account, so much of the engine's time."""
        request.cost.engine_s += engine_s
        self._counters.charge(request.account, engine_s)


def charge(
    step: Step, engine_s: float, read_before: Mapping[RequestKey, float]
) -> tuple[dict[RequestKey, float], float]:
    """Divide the cost of a step among the requests that it computed something for.

    Rows that decoded share the decode part equally; rows that read their prompt share the rest by
    the tokens that were computed for them, so tokens from a cache are free. If no row decoded, or
    none read, the others pay for everything.

    Args:
        engine_s: what it cost, in engine seconds, not negative: its duration, or less if several
            engines shared the device.
        read_before: how many tokens of a request's prompt and answer had been computed before
            this step, in this process or an earlier one; infinity for all of them. None of those
            that are missing.

    Returns:
        Engine seconds by request, also of those that have ended while their row was still in the
        batch; and engine seconds for tokens that had been computed before and were lost. All of
        them are what the step cost, unless it has computed no token.
    """
    rows = step.rows[step.between_steps :] if step.between_steps > 0 else step.rows
    decoded = {row.key for row in rows}
    read = [row for row in step.prefill if row.computed > 0] if step.prefill else ()
    if not read:
        return dict.fromkeys(decoded, engine_s / max(len(decoded), 1)), 0.0
    decode_s = engine_s * _decode_share(step) if decoded else 0.0
    requests = dict.fromkeys(decoded, decode_s / len(decoded)) if decoded else {}
    token_s = (engine_s - decode_s) / sum(row.computed for row in read)
    repeated = 0.0
    for row in read:
        begin = row.done - row.computed
        again = max(0.0, min(row.computed, read_before.get(row.key, 0.0) - begin))
        repeated += again
        if again < row.computed:
            paid_s = requests.get(row.key, 0.0)
            requests[row.key] = paid_s + (row.computed - again) * token_s
    return requests, repeated * token_s


def _decode_share(step: Step) -> float:
    """Return the decode part of a step that also read prompts, from 0 to 1."""
    if step.took_s <= 0:
        return 0.0
    return min(max(step.decode_s / step.took_s, 0.0), 1.0)
