"""Requests under faults, and what each may end with: nothing that was not provoked."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from mlxsup.protocol.ids import unpack_tokens
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from .oracle import Answer, text_of_fake, wrongs

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
