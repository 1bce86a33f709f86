"""Requests that kill, stall or exhaust the engine that answers them (fake engine)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .asks import Ask, Kind, Open
from .commands import Commands
from .ledger import Ledger
from .raw import RawDoor
from .setting import Setting
from .signals import Signals, Start
from support.daemon import is_alive

AT = 3
"""The token at which they strike; two have come by then."""
TOKENS = 9
DEATHS_OF_POISON = 3


class Inside:
    """Asks through its own connection.

    Args:
        endpoint: of the daemon.
        setting: with the right answers.
        ledger: where requests and faults are entered.
        signals: that finds processes.
        commands: that clears what running out of memory has limited.
        new_number: gives the numbers of requests.
        start: lets a request run beside the next faults.
    """

    def __init__(
        self,
        endpoint: str,
        setting: Setting,
        ledger: Ledger,
        signals: Signals,
        commands: Commands,
        new_number: Callable[[], int],
        start: Start,
    ) -> None:
        self._setting, self._ledger, self._start = setting, ledger, start
        self._signals, self._commands = signals, commands
        self._new_number = new_number
        self._door = RawDoor(endpoint, ledger)

    def close(self) -> None:
        """Ends the connection."""
        self._door.close()

    async def strike(self, kind: str, model: str) -> bool:
        """Starts one beside the next faults; whether it struck is known later, and counted then."""
        if kind == "poison":
            if not self._ledger.provocations.is_open(model, "poison"):
                self._start(self._poison(model), kind, model)
            return False
        found = await self._signals.find(model)
        if found is None or found[2] != "READY":
            return False
        if kind == "stall" and not self._ledger.may_accuse(model):
            return False
        process, generation, _ = found
        fault = "stall=sleep" if kind == "stall" else "crash=exit:75"
        directive = f"[[fault {fault} at={AT} generation={generation}]]"
        one = self._ledger.ask(self._ask(model, directive, Kind(kind)))
        entry = self._ledger.provocations.begin(kind, model, is_evidence=kind == "stall")

        async def run() -> bool:
            await self._door.ask(one)
            entry.end()
            if kind == "out of memory":
                await self._commands.strike("restart", model)  # as many rows as before
            return not is_alive(process)

        self._start(run(), kind, model)
        return False

    async def _poison(self, model: str) -> bool:
        """A request that kills its engine each time costs three lives, and none when sent again."""
        ask = self._ask(model, f"[[fault crash=SIGSEGV at={AT}]]", Kind.POISON)
        entry = self._ledger.provocations.begin(
            "poison", model, deaths=DEATHS_OF_POISON, is_evidence=True
        )
        end = await self._door.ask(self._ledger.ask(ask))
        entry.end()
        if end.code != "quarantined":
            return False  # an unload came first, or the ledger objects
        entry = self._ledger.provocations.begin("poison", model, deaths=0, is_evidence=True)
        again: Open = self._ledger.ask(replace(ask, id=f"{ask.id} again"))
        await self._door.ask(again)
        entry.end()
        if entry.deaths == 0 and again.tokens:
            self._ledger.violate("poison", f"{ask.id}: it ran again while it was quarantined")
        return True

    def _ask(self, model: str, directive: str, kind: Kind) -> Ask:
        number = self._new_number()
        prompt = f"{directive} {model} {number}"
        answer = self._setting.answers.answer(model, prompt, TOKENS, None)
        return Ask(
            number=number, id=str(number), model=model, prompt=prompt, max_tokens=TOKENS,
            kind=kind, answer=answer,
        )  # fmt: skip
