"""Requests on real processes while faults strike; every answer is compared (P1)."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence

import psutil

from mlxsup.client import AsyncClient

from .asks import Ask
from .faults import Faults
from .ledger import FEW_STRUCK, Ledger
from .library import LibraryDoor
from .raw import RawDoor
from .report import Report, report
from .setting import Setting
from support.daemon import Daemon

DOORS = 4
"""Connections; every second one is raw."""
CANCELLED, LONG_CANCELLED, LIMITED, NOT_RESUMED = 0.04, 0.3, 0.03, 0.1
"""Shares of the requests: that their clients cancel, that have a deadline, that do not outlive
their worker."""
TIMEOUTS_S = (0.01, 0.05, 0.2, 30.0)
CLIENTS = ("one", "two", None)
PROGRESS_S = 5.0
CALM_S = 60.0
"""Within this time after the last request nothing must be left of any."""
SHOWN_CHARACTERS = 400

Tell = Callable[[str], object]
Door = RawDoor | LibraryDoor


class Chaos:
    """One run against one daemon.

    Args:
        daemon: runs already.
        setting: sizes and faults.
        requests: how many are asked at least; more while a fault has not struck often enough.
        seed: of the faults and of the mix.
        tell: given a line of progress now and then.
    """

    def __init__(
        self, daemon: Daemon, setting: Setting, requests: int, seed: int, tell: Tell
    ) -> None:
        self._daemon, self._setting, self._requests = daemon, setting, requests
        self._seed, self._tell = seed, tell
        self._least = setting.least_of_each(requests)
        self._numbers = itertools.count()
        self._start_s = 0.0
        self.ledger = Ledger(setting.left_tokens)
        self.faults = Faults(daemon, setting, seed, self.ledger, lambda: next(self._numbers))
        self.took_s = 0.0

    async def run(self) -> None:
        """Asks everything while faults strike, and looks at what is left."""
        doors = [
            (RawDoor if n % 2 else LibraryDoor)(self._daemon.endpoint, self.ledger)
            for n in range(DOORS)
        ]
        async with AsyncClient(self._daemon.endpoint) as client:
            await self._setting.answers.learn(client)
            self._start_s, ended = time.monotonic(), asyncio.Event()
            progress = asyncio.create_task(self._tell_progress())
            work = asyncio.create_task(self._ask_under_faults(doors, ended))
            condemned = asyncio.create_task(self.ledger.condemned.wait())
            await asyncio.wait({work, condemned}, return_when=asyncio.FIRST_COMPLETED)
            for task in (progress, condemned):
                task.cancel()
            self.took_s = time.monotonic() - self._start_s
            if work.done():
                await work
                await self._look_at_what_is_left(client)
                for door in doors:
                    await door.fence()
            else:
                work.cancel()
                await asyncio.wait({work})
        for door in doors:
            closed = door.close()
            if closed is not None:
                await closed

    async def _ask_under_faults(self, doors: Sequence[Door], ended: asyncio.Event) -> None:
        models = [*self._setting.models]
        async with asyncio.TaskGroup() as tasks:
            faults = tasks.create_task(self.faults.run(ended))
            async with asyncio.TaskGroup() as askers:
                for n in range(self._setting.askers):
                    door, model = doors[n % DOORS], models[n // DOORS % len(models)]
                    dice = random.Random(f"{self._seed} {n}")
                    askers.create_task(self._ask_on(door, model, dice, ended))
            await faults

    @property
    def _is_over(self) -> bool:
        if time.monotonic() - self._start_s > self._setting.run_limit_s:
            return True
        is_struck = min(self.faults.counts.values()) >= self._least
        is_met = self.ledger.struck >= FEW_STRUCK or not self._setting.has_kills
        return self.ledger.asked >= self._requests and is_struck and is_met

    async def _ask_on(
        self, door: Door, model: str, dice: random.Random, ended: asyncio.Event
    ) -> None:
        limit_s = self._setting.end_limit_s
        while not self._is_over:
            if self._setting.is_roaming:
                model = dice.choice([*self._setting.models])
            one = self.ledger.ask(self._draw(dice, model))
            try:
                async with asyncio.timeout(limit_s):
                    end = await door.ask(one)
            except TimeoutError:
                self.ledger.never_ended(one, limit_s)
                continue
            if end is not None and end.code == "unloaded":
                await self.faults.is_up[model].wait()
        ended.set()  # what is still open may come to its end undisturbed

    def _draw(self, dice: random.Random, model: str) -> Ask:
        number = next(self._numbers)
        prompt, max_tokens, seed = self._setting.answers.draw(dice, model, number)
        answer = self._setting.answers.answer(model, prompt, max_tokens, seed)
        is_long = len(answer.tokens) > 2 * self._setting.left_tokens
        share = LONG_CANCELLED if is_long else CANCELLED
        is_cancelled, is_limited = dice.random() < share, dice.random() < LIMITED
        return Ask(
            number=number,
            id=str(number),
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            seed=seed,
            resume=dice.random() >= NOT_RESUMED,
            timeout_s=dice.choice(TIMEOUTS_S) if is_limited else None,
            cancel_after=dice.randrange(len(answer.tokens)) if is_cancelled else None,
            client=dice.choice(CLIENTS),
            answer=answer,
        )

    async def _look_at_what_is_left(self, client: AsyncClient) -> None:
        """Nothing runs or waits, no process is left over, and none has died by itself."""
        until_s = time.monotonic() + CALM_S
        while True:
            status = await client.status()
            rows = status["models"]
            left = [*(n for row in rows for n in row["running"]), *status["queue"]["per_client"]]
            spares = status["spares"]["workers"]
            is_settled = all(row["state"] in ("READY", "STOPPED") for row in rows)
            is_settled &= all(spare["state"] == "waiting" for spare in spares)
            if (not left and is_settled) or time.monotonic() > until_s:
                break
            await asyncio.sleep(0.1)
        if left or not is_settled:
            states = {row["name"]: row["state"] for row in rows}
            self.ledger.violate("left over", f"{left} after the last end; {states}")
        for row in rows:
            died, most = row["generation"] - 1, self.ledger.provocations.deaths_of(row["name"])
            if died > most:
                self.ledger.violate("deaths", f"{row['name']}: {died} died, {most} were struck")
        self._look_at_processes({one["pid"] for one in (*rows, *spares)})

    def _look_at_processes(self, known: set[int | None]) -> None:
        assert self._daemon.process is not None
        children = psutil.Process(self._daemon.process.pid).children(recursive=True)
        strangers = [child for child in children if child.pid not in known]
        if strangers:
            self.ledger.violate("processes", f"{strangers} are left over")

    async def _tell_progress(self) -> None:
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_S)  # the beat of what people see, no wait for anything
            took_s, asked = time.monotonic() - self._start_s, self.ledger.asked
            counts = self.faults.counts
            rarest = min(counts, key=counts.__getitem__)
            self._tell(
                f"{took_s:.1f} s: {asked} of {self._requests} requests, {asked / took_s:.0f}/s,"
                f" {counts.total()} faults, fewest: {counts[rarest]} {rarest},"
                f" {len(self.ledger.violations)} violations"
            )
            for violation in self.ledger.violations[told:]:
                self._tell(f"violated {violation}")
            told = len(self.ledger.violations)


def run_chaos(
    setting: Setting,
    requests: int,
    seed: int,
    *,
    environment: Mapping[str, str] | None = None,
    tell: Tell = lambda line: None,
) -> Report:
    """Runs it once; whatever is wrong is in the report.

    Args:
        setting: sizes and faults.
        requests: how many are asked at least.
        seed: of the faults and of the mix.
        environment: of the daemon, beside this process's own.
        tell: given a line of progress now and then.
    """
    daemon = Daemon(dict(setting.models), dict(setting.supervisor))
    try:
        daemon.start(environment=dict(environment or {}))
        chaos = Chaos(daemon, setting, requests, seed, tell)
        asyncio.run(chaos.run())
        _check_logs(daemon, chaos.ledger)
    except BaseException as error:
        daemon.__exit__(type(error), error, error.__traceback__)
        raise
    try:
        daemon.__exit__(None, None, None)
    except AssertionError as error:  # processes are left
        chaos.ledger.violate("exit", str(error)[:SHOWN_CHARACTERS])
    return report(chaos.ledger, chaos.faults, setting, requests, chaos.took_s)


def _check_logs(daemon: Daemon, ledger: Ledger) -> None:
    """No log holds an unwanted word, whatever was done; the supervisor's least of all."""
    try:
        daemon.check_logs()
    except AssertionError as error:
        ledger.violate("log", str(error)[:SHOWN_CHARACTERS])
