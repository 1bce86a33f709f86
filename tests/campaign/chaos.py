"""P1: requests on the fake engine while seeded faults strike, each answer and each end judged."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

import psutil

from mlxsup.client import AsyncClient, RequestError

from .frames import hostile_frames
from .judge import END_LIMIT_S, EVIDENCE, LAG_S, SILENT, Blow, Door, Judge, Request
from .scenario import FAKE, Place, Scenario, Values, count
from .watch import SOON, require
from support.cli.scripted_daemon import ScriptedDaemon
from support.client.raw_client import RawClient
from support.daemon.daemon import Daemon, fake, is_alive
from support.eventually import INTERVAL_S

KINDS = (*SILENT, *EVIDENCE, "restart", "restart --now", "reload", "unload", "client gone",
         "garbage", "out of memory", "pause")  # fmt: skip
DOORS, ASKERS = 4, 64
SHORT, LONG = (8, 32), 300
"""Tokens of most answers, and of a few."""

PAUSE_S = 0.3
"""From one fault to the next, on average."""


class Chaos:
    """One run against one daemon.

    Args:
        daemon: runs already.
        models: their names.
        requests: how many are asked at least.
        kinds: of the faults; each comes once before any comes again.
        least: how often each must strike.
        limit_s: a run that takes longer asks no more.
        seed: of everything that is drawn.
    """

    def __init__(self, daemon: Daemon, models: str, *, requests: int, kinds: tuple[str, ...],
                 least: int, limit_s: float, seed: int) -> None:  # fmt: skip
        assert daemon.process is not None
        self._main = psutil.Process(daemon.process.pid)
        self._endpoint, self._models, self._seed = daemon.endpoint, [*models], seed
        self._requests, self._least, self._kinds = requests, least, kinds
        self._limit_s = time.monotonic() + limit_s
        self._dice, self._numbers = random.Random(seed), itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.judge = Judge()
        self.counts: Counter[str] = Counter(dict.fromkeys(kinds, 0))

    async def run(self) -> None:
        """Ask while faults strike, and look at what is left."""
        self._turns = {model: asyncio.Lock() for model in self._models}
        async with AsyncClient(self._endpoint) as self._client:
            self._doors = [Door(self._endpoint, self.judge) for _ in range(DOORS)]
            work = asyncio.create_task(self._ask_under_faults())
            condemned = asyncio.create_task(self.judge.condemned.wait())
            try:
                await asyncio.wait({work, condemned}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    await work
                    await self._check_calm()
                    for door in self._doors:
                        await door.fence()
                    self.judge.check_sums(sum(len(door.requests) for door in self._doors))
            finally:
                for task in (*self._tasks, condemned, work):
                    task.cancel()
                await asyncio.gather(*self._tasks, condemned, work, return_exceptions=True)
                for door in self._doors:
                    door.close()

    async def _ask_under_faults(self) -> None:
        faults = self._start(self._strike_all())
        await asyncio.gather(*(self._ask(n) for n in range(ASKERS)))
        faults.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def _is_over(self) -> bool:
        is_struck = min(self.counts.values()) >= self._least
        is_done = self.judge.sums["requests"] >= self._requests and is_struck
        return is_done or time.monotonic() > self._limit_s

    async def _ask(self, number: int) -> None:
        model, dice = self._models[number // DOORS % len(self._models)], random.Random(self._seed)
        dice.seed(f"{self._seed} {number}")
        while not self._is_over:
            end = await self._doors[number % DOORS].ask(self._draw(dice, model))
            if end == "unloaded":
                async with self._turns[model]:  # once it is loaded again
                    pass

    def _draw(self, dice: random.Random, model: str) -> Request:
        is_long, number = dice.random() < 0.05, next(self._numbers)
        tokens = LONG if is_long else dice.randint(*SHORT)
        own_end = f" [[answer {dice.randint(1, tokens)}]]" if dice.random() < 0.2 else ""
        is_cancelled = dice.random() < (0.5 if is_long else 0.04)
        return Request(
            id=str(number),
            model=model,
            prompt=f"{model} {number}{own_end}",
            max_tokens=tokens,
            seed=dice.choice((None, 7, dice.getrandbits(31))),
            resume=dice.random() >= 0.1,
            timeout_s=dice.choice((0.01, 0.05, 0.2, 30.0)) if dice.random() < 0.03 else None,
            cancel_after=dice.randrange(1, tokens) if is_cancelled else None,
        )

    # ------------------------------------------------------------ striking

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _strike_all(self) -> None:
        order: list[str] = []
        while True:
            order = order or self._dice.sample(self._kinds, len(self._kinds))
            kind, model = order.pop(), self._dice.choice(self._models)
            # Faults that come faster than models load would only show models that load.
            least = self.judge.ends["finished"] + 4
            self._start(self._within_limit(self._blow(kind, model), kind))
            await asyncio.sleep(self._dice.uniform(0.5, 1.5) * PAUSE_S)
            while self.judge.ends["finished"] < least:  # noqa: ASYNC110 - of many writers
                await asyncio.sleep(INTERVAL_S)

    async def _within_limit(self, work: Coroutine[Any, Any, bool], kind: str) -> None:
        try:
            self.counts[kind] += await asyncio.wait_for(work, END_LIMIT_S)
        except TimeoutError:
            self.judge.violate("liveness", f"{kind} did not end")

    async def _blow(self, kind: str, model: str) -> bool:
        """Strike; return whether there was something to strike."""
        match kind:
            case "restart" | "restart --now" | "unload":
                return not self._turns[model].locked() and await self._command(kind, model)
            case "reload":
                self._main.send_signal(signal.SIGHUP)
                return True
            case "client gone":
                async with AsyncClient(self._endpoint) as leaving:
                    prompts = [f"left {next(self._numbers)}" for _ in range(5)]
                    asked = [leaving.generate(model, prompt=p, max_tokens=200) for p in prompts]
                    await leaving.ping()
                    del asked
                return True
            case "garbage":
                await asyncio.to_thread(self._send_garbage)
                return True
            case "pause":
                return await self._pause(model)
            case "poison" | "stall" | "out of memory":
                return await self._ask_badly(kind, model)
        process = await self._process(model)
        if process is None or (kind in EVIDENCE and not self.judge.may_accuse(model)):
            return False
        blow = self.judge.begin(kind, model)
        with suppress(psutil.NoSuchProcess):
            process.send_signal(getattr(signal, kind))
        while is_alive(process):  # noqa: ASYNC110 - it is no child of this process
            await asyncio.sleep(INTERVAL_S)
        blow.end()
        return True

    async def _row(self, model: str) -> dict[str, Any]:
        rows = (await self._client.status())["models"]
        return next(row for row in rows if row["name"] == model)

    async def _process(self, model: str) -> psutil.Process | None:
        pid = (await self._row(model))["pid"]
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid) if pid is not None else None
            return process if process and process.ppid() == self._main.pid else None
        return None

    async def _command(self, kind: str, model: str) -> bool:
        """Give one command at a time to each model: they would pile up, and models only load."""
        judge, client = self.judge, self._client
        async with self._turns[model]:
            blow = judge.begin(kind, model)
            if kind == "unload":
                await self._call(client.unload(model), blow)
                await self._call(client.load(model), blow)
            else:
                for poison in judge.met(model, math.inf, "poison"):  # it is forgotten, and strikes
                    poison.deaths += 3
                await self._call(client.restart(model, now=kind == "restart --now"), blow)
            blow.end()
        return True

    async def _call(self, call: Awaitable[object], blow: Blow) -> None:
        """A command may fail only because another fault struck the load that it waits for."""
        try:
            await call
        except RequestError as error:
            others = [b for b in self.judge.met(blow.model, blow.begun_s - LAG_S) if b is not blow]
            if error.code != "load_failed" or not others:
                self.judge.violate("command", f"{blow.kind} of {blow.model}: {error}")

    def _send_garbage(self) -> None:
        with RawClient(self._endpoint) as client:
            for _ in range(20):
                client.say(hostile_frames(self._dice))
            client.hear_any()

    async def _ask_badly(self, kind: str, model: str) -> bool:
        """Ask what kills, stalls or exhausts the engine that answers it, at its third token."""
        judge, number, row = self.judge, next(self._numbers), await self._row(model)
        process = await self._process(model)
        is_safe = kind == "out of memory" or judge.may_accuse(model)
        if process is None or row["state"] != "READY" or not is_safe:
            return False
        fault = {
            "poison": "crash=SIGSEGV",
            "stall": "stall=sleep",
            "out of memory": "crash=exit:75",
        }
        once = "" if kind == "poison" else f" generation={row['generation']}"
        prompt = f"[[fault {fault[kind]} at=3{once}]] {model} {number}"
        ask = partial(Request, model=model, prompt=prompt, max_tokens=9, kind=kind)
        blow = judge.begin(kind, model, deaths=3 if kind == "poison" else 1)
        end = await self._doors[0].ask(ask(id=str(number)))
        blow.end()
        if kind == "out of memory":
            await self._command("restart", model)  # as many rows as before
        if kind != "poison" or end != "quarantined":
            return kind != "poison" and not is_alive(process)
        blow = judge.begin(kind, model, deaths=0)
        again = ask(id=f"{number} again")
        await self._doors[0].ask(again)
        blow.end()
        if again.answer.tokens and not blow.deaths:
            judge.violate("poison", f"{number}: it ran again while it was quarantined")
        return True

    async def _pause(self, model: str) -> bool:
        """Pause a request by hand and resume it; return whether it was seen to be paused."""
        judge, running = self.judge, (await self._row(model))["running"]
        may = [r for r in judge.open if r.id in running and r.resume and not r.is_being_paused]
        if not may:
            return False
        one = max(may, key=lambda r: r.left)
        has_begun, one.pauses, one.is_being_paused = bool(one.answer.tokens), one.pauses + 1, True
        try:
            await self._client.pause(one.id)
            while one.id not in (await self._row(model))["paused"]:
                if one not in judge.open:
                    return False
                await asyncio.sleep(INTERVAL_S)
            one.seen_paused += has_begun
            await asyncio.sleep(self._dice.uniform(0.0, 1.5))  # the pause itself, which lasts
            await self._client.resume(one.id)
        except RequestError as error:
            if error.code != "invalid_request":  # it had ended
                judge.violate("pause", f"{one.id}: {error}")
            return False
        finally:
            one.is_being_paused = False
        if one.id in (await self._row(model))["paused"]:
            judge.violate("pause", f"{one.id} is still paused after its resume")
        return True

    async def _check_calm(self) -> None:
        """See that nothing runs or waits, and that no more died than were struck."""
        until_s, is_calm = time.monotonic() + 60.0, False
        while not is_calm and time.monotonic() < until_s:
            await asyncio.sleep(0.1)
            status = await self._client.status()
            rows, waiting = status["models"], status["queue"]["per_client"]
            is_calm = all(row["state"] == "READY" and not row["running"] for row in rows)
            is_calm &= not waiting
        if not is_calm:
            self.judge.violate("left over", f"{waiting}, {[row['state'] for row in rows]}")
        for row in rows:
            most = sum(blow.deaths for blow in self.judge.blows[row["name"]])
            if row["generation"] - 1 > most:
                self.judge.violate("deaths", f"{row['name']}: {row['generation']}, {most} struck")


def run_chaos(requests: int, seed: int = 1, *, kinds: tuple[str, ...] = KINDS, models: str = "abcd",
              least: int = 1, limit_s: float = 900.0,
              sabotage: str = "") -> dict[str, float]:  # fmt: skip
    """Run once.

    Args:
        requests: how many are asked at least.
        seed: of everything that is drawn.
        kinds: of the faults.
        models: their names, a letter each.
        least: how often each fault must strike.
        limit_s: a run that takes longer asks no more.
        sabotage: Python that the supervisor runs first: the bugs that a test plants.

    Raises:
        AssertionError: a promise is broken.
        NotShown: too little was struck or asked to judge.
    """
    entry = {"restart": SOON, "max_concurrency": 32, "step_timeout_s": 5.0}
    entries = {name: fake(fake={"step_s": 0.002, "voice": name}, **entry) for name in models}
    daemon = ScriptedDaemon(entries, {"max_queue_per_client": 1024, "parallel_loads": 2})
    daemon.scripted(sabotage).start()
    try:
        chaos = Chaos(daemon, models, requests=requests, kinds=kinds, least=least,
                      limit_s=limit_s, seed=seed)  # fmt: skip
        asyncio.run(chaos.run())
    except BaseException as error:
        daemon.__exit__(type(error), error, error.__traceback__)
        raise
    judge = chaos.judge
    try:
        daemon.__exit__(None, None, None)
    except AssertionError as error:  # processes are left, or a log is not clean
        judge.violate("exit", str(error)[:400])
    print(f"chaos: {dict(judge.ends)}; {dict(judge.sums)}; struck: {dict(chaos.counts)}")
    assert not judge.violations, "\n".join(judge.violations)
    for kind, struck in chaos.counts.items():
        require(struck >= least, f"{kind} struck {struck} times, not {least}")
    asked = judge.sums["requests"]
    require(asked >= requests, f"{asked} requests, not {requests}")
    return {"requests": asked, "faults": chaos.counts.total(), "resumed": judge.sums["resumed"],
            "paused": judge.sums["paused"], "violations": 0}  # fmt: skip


def under_faults(place: Place) -> Values:
    """Strike with every kind of fault."""
    requests = place.requests or place.size(100_000, small=400)
    return run_chaos(requests, place.seed, least=max(1, requests // 6000))


SCENARIOS = (
    Scenario(name="chaos", promises="P1 P10", where=FAKE, rounds=1, run=under_faults, figures=(
        count("requests", "requests under seeded faults, each end and each token judged", None),
        count("faults", "the same: faults that struck", None),
        count("resumed", "the same: resumes of answers", None),
        count("paused", "the same: returns from pauses", None),
        count("violations", "the same: answers, ends, counts and logs that were not promised"))),
)  # fmt: skip
