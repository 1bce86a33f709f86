"""P1, P10: requests while seeded faults strike, each answer and each end judged."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgpack
import psutil
import zmq
import zmq.asyncio

from mlxsup.client import AsyncClient, RequestError
from mlxsup.protocol.ids import unpack_tokens
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from .hostile import hostile_frames
from .oracle import Answer, text_of_fake, wrongs
from .scenario import FAKE, Place, Scenario, Values, count, require
from .watch import SOON
from support.client.raw_client import RawClient
from support.daemon.daemon import Daemon, fake, is_alive
from support.eventually import INTERVAL_S

SILENT = ("SIGKILL", "SIGTERM", "SIGSTOP")
"""Deaths from outside, which accuse no request."""

EVIDENCE = ("SIGSEGV", "SIGABRT", "stall", "poison")
"""Deaths that accuse the requests that ran."""

ORDERLY = ("restart", "unload")
"""Ends of a process in which no row is lost."""

LEFT_TOKENS = 100
"""Of an answer, which no client lags behind: with more to come, a request cannot have ended."""

LAG_S = 1.0
"""By how much a client may see something later than the supervisor."""

FEW, MANY = 3, 10
END_LIMIT_S = 120.0
MOST_VIOLATIONS = 20


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """What is asked, and what has come of it; no two bodies are equal."""

    id: str
    model: str
    prompt: str
    max_tokens: int
    seed: int | None = None
    resume: bool = True
    timeout_s: float | None = None
    cancel_after: int | None = None
    kind: str = "ordinary"
    answer: Answer = field(default_factory=Answer)
    sent_s: float = field(default_factory=time.monotonic)
    first_s: float | None = None
    last_s: float | None = None
    left_at_cancel: int | None = None
    was_struck: bool = False
    pauses: int = 0
    seen_paused: int = 0
    is_being_paused: bool = False
    right: list[int] = field(init=False)
    finish: str = field(init=False, default="length")
    ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        tokens = self.max_tokens
        if "[[answer " in self.prompt:
            own = int(self.prompt.partition("[[answer ")[2].partition("]]")[0])
            tokens, self.finish = (own, "stop") if own < tokens else (tokens, "length")
        ids = encode_text(self.prompt)
        self.right = answer_tokens(ids, tokens, self.seed, voice=self.model)

    @property
    def left(self) -> int:
        """Tokens that are to come."""
        return len(self.right) - len(self.answer.tokens)

    def frames(self) -> list[bytes]:
        """The request as it travels, written without any code of the product."""
        header: dict[str, Any] = {"type": "generate", "v": 2, "id": self.id, "model": self.model}
        header |= {"resume": self.resume, "timeout_s": self.timeout_s}
        header = {key: value for key, value in header.items() if value is not None}
        body: dict[str, Any] = {"prompt": self.prompt, "max_tokens": self.max_tokens}
        if self.seed is not None:
            body |= {"seed": self.seed, "temperature": 0.8}
        return [msgpack.packb(header), msgpack.packb(body)]


@dataclass(slots=True, kw_only=True, eq=False)
class Blow:
    """A fault, from before it struck until its effect was seen.

    Attributes:
        deaths: how many processes it may have ended.
    """

    kind: str
    model: str
    deaths: int
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float = math.inf

    def end(self) -> None:
        """Note that its effect is over."""
        self.ended_s = time.monotonic()


class Judge:
    """Holds every end against what was asked, what came, and what was done meanwhile."""

    def __init__(self) -> None:
        self.open: set[Request] = set()
        self.ends, self.sums = Counter[str](), Counter[str]()
        self.violations: list[str] = []
        self.condemned = asyncio.Event()
        self.blows: defaultdict[str, list[Blow]] = defaultdict(list)
        self._turns_until: dict[str, float] = {}

    def violate(self, check: str, text: str) -> None:
        """Note a broken promise; a run that has seen enough of them ends at once."""
        self.violations.append(f"{check}: {text}")
        if len(self.violations) >= MOST_VIOLATIONS:
            self.condemned.set()

    # ------------------------------------------------------------ what is done

    def begin(self, kind: str, model: str, deaths: int = 1) -> Blow:
        """Enter a fault that is about to strike, and mark the requests that it kills."""
        blow = Blow(kind=kind, model=model, deaths=deaths)
        self.blows[model].append(blow)
        if kind.startswith("SIG") or kind == "restart --now":
            for one in self.open:
                lasts = one.resume and one.timeout_s is None and one.cancel_after is None
                if one.model == model and one.answer.tokens and one.left > LEFT_TOKENS:
                    one.was_struck |= lasts and not one.pauses  # or its row may be out of the batch
        return blow

    def met(self, model: str, from_s: float, *kinds: str) -> list[Blow]:
        """Return the faults whose effect a request of this time may have met."""
        blows = (blow for blow in self.blows[model] if blow.ended_s >= from_s)
        return [blow for blow in blows if not kinds or blow.kind in kinds]

    def losses(self, model: str, from_s: float) -> int:
        """Return how many deaths may have met rows since then."""
        return sum(b.deaths for b in self.met(model, from_s) if b.kind not in ORDERLY)

    def evidence(self, request: Request) -> int:
        """Return how many deaths that accuse there may have been since it was sent."""
        return sum(b.deaths for b in self.met(request.model, request.sent_s, *EVIDENCE))

    def may_accuse(self, model: str) -> bool:
        """True if a death with evidence, now, can lead to no quarantine of an innocent request."""
        if any(blow.ended_s == math.inf for blow in self.met(model, 0.0, "poison", "stall")):
            return False
        return max((self.evidence(r) for r in self.open if r.model == model), default=0) < 2

    def meets_turns(self, request: Request) -> bool:
        """True if suspects may have taken turns since it was sent: it may have left the batch."""
        if self._turns_until.get(request.model, 0.0) >= request.sent_s:
            return True
        return any(r.model == request.model and self.evidence(r) >= 2 for r in self.open)

    # ------------------------------------------------------------ what comes of it

    def end(self, request: Request, message: dict[str, Any]) -> None:
        """Judge a request that has ended."""
        has_failed = message["type"] == "failed"
        code = message["error"]["code"] if has_failed else message["finish_reason"]
        request.answer.ends.append(code)
        has_turns = self.meets_turns(request)
        self.open.discard(request)
        if self.evidence(request) >= 2:
            self._turns_until[request.model] = time.monotonic()
        is_good = not has_failed and code != "cancelled"
        self.ends["finished" if is_good else code] += 1
        self.sums["requests"] += 1
        where = f"{request.model} {request.id} ({request.kind}, {code})"
        text = text_of_fake(request.right, is_whole=True)
        for problem in wrongs(request.answer, request.right, text, may_be_cut=not is_good):
            self.violate("answer", f"{where}: {problem}")
        if not has_failed:
            self._check_done(request, message, where, has_turns)
        elif not self._is_provoked(request, code, has_turns):
            self.violate(f"unprovoked {code}", where)
        request.ended.set()

    def _check_done(
        self, request: Request, message: dict[str, Any], where: str, has_turns: bool
    ) -> None:
        code, answer, used = message["finish_reason"], request.answer, message.get("usage", {})
        seed, resumed = message.get("seed"), message.get("resumed", 0)
        paused = message.get("paused", 0)
        is_early = code == "cancelled" and not answer.tokens  # it may not have been accepted
        was_cancelled = code == "cancelled" and request.left_at_cancel is not None
        most = self.losses(request.model, request.sent_s)
        least = 0 if code == "cancelled" else request.seen_paused
        prompt = len(encode_text(request.prompt))
        for check, holds, text in (
            ("poison", request.kind != "poison", "a request that kills its engine ended well"),
            ("finish", code == request.finish or was_cancelled, f"not {request.finish}"),
            ("answer", message["seq"] == len(answer.numbers), f"{message['seq']} pieces"),
            ("usage", is_early or used.get("prompt_tokens") == prompt, f"{used}"),
            ("usage", used.get("completion_tokens", 0) == len(answer.tokens), f"{used}"),
            ("seed", is_early or (seed is not None and request.seed in (None, seed)), f"{seed}"),
            ("resumed", resumed <= most, f"{resumed} times under at most {most} deaths"),
            ("paused", least <= paused, f"{paused} times, and was seen paused {least}"),
            ("paused", paused <= request.pauses or has_turns, f"{paused} of {request.pauses}"),
        ):
            if not holds:
                self.violate(check, f"{where}: {text}")
        self.sums.update(resumed=resumed, paused=paused, struck=request.was_struck)
        self.sums["struck_resumed"] += request.was_struck and resumed > 0
        if (request.left_at_cancel or 0) > LEFT_TOKENS:
            self.sums.update(cut=1, cut_short=code == "cancelled")

    def _is_provoked(self, request: Request, code: str, has_turns: bool) -> bool:
        """True if this error may be this request's end, by what was done to its model."""
        model, sent_s, limit_s = request.model, request.sent_s, request.timeout_s
        match code:
            case "worker_crashed" if not request.resume:
                return self.losses(model, sent_s) > 0
            case "worker_crashed":
                silent = self.met(model, (request.last_s or sent_s) - LAG_S, *SILENT)
                return sum(blow.deaths for blow in silent) >= 3
            case "deadline_exceeded":
                return limit_s is not None and time.monotonic() - sent_s >= limit_s
            case "unloaded":
                unloads = self.met(model, sent_s, "unload")
                ran = request.first_s is not None and all(
                    request.first_s < blow.begun_s for blow in unloads
                )  # then it is waited for, unless its process dies or suspects take turns
                return bool(unloads) and (not ran or has_turns or self.losses(model, sent_s) > 0)
            case "quarantined":
                return request.kind == "poison"
            case "insufficient_memory":
                return request.kind == "out of memory"
        return False

    def check_sums(self, asked: int) -> None:
        """Judge what only the sums show; a few that were struck or cancelled had just ended."""
        sums = self.sums
        if asked != sums["requests"]:
            self.violate("liveness", f"{asked} were asked, {sums['requests']} have ended")
        for part, whole, check in (("struck_resumed", "struck", "resumed"),
                                   ("cut_short", "cut", "cancel")):  # fmt: skip
            is_few = 2 * sums[part] < sums[whole] if sums[whole] >= MANY else not sums[part]
            if sums[whole] >= FEW and is_few:
                self.violate(check, f"{sums[part]} of {sums[whole]} that were {whole}")


class Door:
    """A client that is a socket and msgpack; it reads on after each end, and judges what comes."""

    def __init__(self, endpoint: str, judge: Judge) -> None:
        self._judge, self._context = judge, zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self.requests: dict[str, Request] = {}
        self._fence = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def ask(self, request: Request) -> str:
        """Send a request; return how it ended."""
        self.requests[request.id] = request
        self._judge.open.add(request)
        request.sent_s = time.monotonic()
        await self._socket.send_multipart(request.frames())
        try:
            await asyncio.wait_for(request.ended.wait(), END_LIMIT_S)
        except TimeoutError:
            self._judge.open.discard(request)
            self._judge.violate("liveness", f"{request.model} {request.id}: no end")
            return "none"
        return request.answer.ends[0]

    async def fence(self) -> None:
        """Read what the daemon sent before it answers a ping."""
        await self._say({"type": "ping", "id": "fence"})
        with suppress(TimeoutError):
            await asyncio.wait_for(self._fence.wait(), END_LIMIT_S)

    def close(self) -> None:
        """End the connection."""
        self._reading.cancel()
        self._context.destroy(linger=0)

    async def _say(self, header: dict[str, Any]) -> None:
        await self._socket.send(msgpack.packb(header | {"v": 2}))

    async def _read(self) -> None:
        while True:
            message = msgpack.unpackb(await self._socket.recv())
            kind = message["type"]
            if kind == "deltas":
                for delta in message["deltas"]:
                    if request := self._find(delta["id"], "a piece"):
                        await self._take(request, delta)
            elif kind in ("done", "failed"):
                if request := self._find(message["id"], "an end"):
                    self._judge.end(request, message)
            elif kind == "reply":
                self._fence.set()
            elif kind != "alive":
                self._judge.violate("unasked", f"a message of type {kind}")

    def _find(self, name: str, what: str) -> Request | None:
        request = self.requests.get(name)
        if request is None or request.answer.ends:
            self._judge.violate("after the end" if request else "unknown id", f"{what} of {name}")
            return None
        return request

    async def _take(self, request: Request, delta: dict[str, Any]) -> None:
        answer, tokens = request.answer, unpack_tokens(delta["tokens"])
        answer.numbers.append(delta["seq"])
        answer.text += msgpack.unpackb(delta["body"]).get("text", "")
        answer.tokens += tokens
        if tokens:
            request.last_s = time.monotonic()
            request.first_s = request.first_s or request.last_s
        is_due = len(answer.tokens) >= (request.cancel_after or math.inf)
        if is_due and request.left_at_cancel is None:
            request.left_at_cancel = request.left
            await self._say({"type": "cancel", "id": request.id})


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
              least: int = 1, limit_s: float = 900.0) -> dict[str, float]:  # fmt: skip
    """Run once.

    Args:
        requests: how many are asked at least.
        seed: of everything that is drawn.
        kinds: of the faults.
        models: their names, a letter each.
        least: how often each fault must strike.
        limit_s: a run that takes longer asks no more.

    Raises:
        AssertionError: a promise is broken.
        NotShown: too little was struck or asked to judge.
    """
    entry = {"restart": SOON, "max_concurrency": 32, "step_timeout_s": 5.0}
    entries = {name: fake(fake={"step_s": 0.002, "voice": name}, **entry) for name in models}
    daemon = Daemon(entries, {"max_queue_per_client": 1024, "parallel_loads": 2})
    daemon.start()
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


CHAOS = Scenario("chaos", "P1 P10", FAKE, 1, under_faults, (
    count("requests", "requests under seeded faults, each end and each token judged", None),
    count("faults", "the same: faults that struck", None),
    count("resumed", "the same: resumes of answers", None),
    count("paused", "the same: returns from pauses", None),
    count("violations", "the same: answers, ends, counts and logs that were not promised"),
))  # fmt: skip
