"""What the campaign itself has done to each model, and what that may have caused."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True, eq=False)
class Provocation:
    """One fault, from before it struck until its effect has been seen.

    Attributes:
        kind: its name.
        model: whose process it struck.
        begun_s: before it struck, monotonic seconds.
        ended_s: after the process was seen to be gone, or the command had its answer; infinite
            until then.
        deaths: how many processes it may have ended.
        is_evidence: whether those deaths accuse the requests that ran.
        is_silent: whether those deaths accuse nobody, and nobody asked for them.
        loses_rows: whether requests may be running when the process ends.
        unloads: whether it unloads the model.
        is_recovered: whether the model was seen to be READY afterwards.
    """

    kind: str
    model: str
    begun_s: float
    ended_s: float = math.inf
    deaths: int = 1
    is_evidence: bool = False
    is_silent: bool = False
    loses_rows: bool = True
    unloads: bool = False
    is_recovered: bool = False

    def end(self) -> None:
        """Its effect is over."""
        self.ended_s = time.monotonic()


class Provocations:
    """Every fault of a run, entered before it strikes."""

    def __init__(self) -> None:
        self._of_model: defaultdict[str, list[Provocation]] = defaultdict(list)

    def begin(
        self,
        kind: str,
        model: str,
        *,
        deaths: int = 1,
        is_evidence: bool = False,
        is_silent: bool = False,
        loses_rows: bool = True,
        unloads: bool = False,
    ) -> Provocation:
        """Enters a fault that is about to strike; see `Provocation`."""
        entry = Provocation(
            kind=kind,
            model=model,
            begun_s=time.monotonic(),
            deaths=deaths,
            is_evidence=is_evidence,
            is_silent=is_silent,
            loses_rows=loses_rows,
            unloads=unloads,
        )
        self._of_model[model].append(entry)
        return entry

    def lift(self, model: str) -> None:
        """What is held against requests is about to be forgotten: a poison strikes anew."""
        for entry in self._of_model[model]:
            if entry.kind == "poison" and entry.ended_s == math.inf:
                entry.deaths += 3

    def during(self, model: str, from_s: float, until_s: float) -> Iterator[Provocation]:
        """The faults whose time meets this one."""
        for entry in self._of_model[model]:
            if entry.begun_s <= until_s and from_s <= entry.ended_s:
                yield entry

    def is_open(self, model: str, *kinds: str) -> bool:
        """Whether the effect of such a fault has not been seen yet."""
        return any(e.kind in kinds and e.ended_s == math.inf for e in self._of_model[model])

    def take_unrecovered(self, model: str, kinds: Sequence[str]) -> list[Provocation]:
        """Such faults whose process is gone, when the model is READY for the first time since."""
        found = [
            entry
            for entry in self._of_model[model]
            if entry.kind in kinds and entry.ended_s < math.inf and not entry.is_recovered
        ]
        for entry in found:
            entry.is_recovered = True
        return found

    def deaths_beside(self, entry: Provocation) -> int:
        """How many processes other faults may have ended during one that has not ended yet."""
        others = self.during(entry.model, entry.begun_s, math.inf)
        return sum(other.deaths for other in others if other is not entry)

    def deaths_of(self, model: str) -> int:
        """How many processes of a model may have ended so far."""
        return sum(entry.deaths for entry in self._of_model[model])

    def losses(self, model: str, from_s: float, until_s: float) -> int:
        """How many deaths may have met requests that ran in this time."""
        entries = self.during(model, from_s, until_s)
        return sum(entry.deaths for entry in entries if entry.loses_rows)

    def silent_losses(self, model: str, from_s: float, until_s: float) -> int:
        """How many deaths without evidence there may have been in this time."""
        entries = self.during(model, from_s, until_s)
        return sum(entry.deaths for entry in entries if entry.is_silent)

    def evidence(self, model: str, from_s: float, until_s: float) -> int:
        """How many deaths with evidence there may have been in this time."""
        entries = self.during(model, from_s, until_s)
        return sum(entry.deaths for entry in entries if entry.is_evidence)
