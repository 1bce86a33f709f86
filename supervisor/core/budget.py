"""The memory budget: what one model needs of it, what all may take together, what other programs
leave of it, and which models have room in it.

Of a model one row of 4,096 tokens is reserved and not the whole context, which few requests come
near: reserving that would refuse combinations of models that serve well. A need is more than it was
appraised at if processes of the model run out of memory. That never keeps out a model that fits as
it was appraised: it is cut to what the budget has next to the pinned models.

What models hold and what is available do not change together when a model loads, grows or ends,
only with what all other programs hold. The room for models is that sum, less what is kept free.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mlxsup.protocol.cache_cost import GROWTH_TOKENS, cache_bytes, tokens_within
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.ids import ModelName
from mlxsup.protocol.tasks import Task
from mlxsup.protocol.text import listed, size_text

if TYPE_CHECKING:
    from mlxsup.protocol.worker_messages import Ready

T = TypeVar("T")

# ---------------------------------------------------------------- what one model needs


class Source(StrEnum):
    """The source of a figure."""

    MEASURED = "measured"
    """By a worker that had this model loaded."""
    ESTIMATED = "estimated"
    """From the files of the model, or a first guess."""
    GIVEN = "given"
    """By the configuration, or by convention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A size, and how far it can be trusted.

    Attributes:
        source: where it comes from.
    """

    size_bytes: int
    source: Source


SPARE_SHARE = 4
"""A process that was measured may take a quarter more the next time; one that was only guessed at
may take twice as much. A size that a hint names allows for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The memory that one model needs. A row is a request that runs; a batch pads its rows to the
    longest.

    Attributes:
        weights: the model's arrays.
        own: what its process takes besides: interpreter, libraries, the device's context.
        layers: what its layers keep for each row.
        layers_source: where that comes from.
        remark: why the caches may differ from the estimate, a sentence; empty if nothing is known.
        context_tokens: a row has at most this many tokens.
        least_tokens: memory is reserved for a row of at least this many tokens.
        max_rows: rows that run at the same time, at most.
        task: what it is for, as its files say.
        takes_pictures: true if its files say that it does.
        given_bytes: what the entry's `memory` allows it; None: what it needs is up to the planner.
        raised_bytes: how much more is reserved for it, because its processes ran out of memory.
        most_bytes: being raised takes it no further than that; None: nothing limits it.
    """

    weights: Figure
    own: Figure
    layers: tuple[CacheLayers, ...]
    layers_source: Source
    context_tokens: int
    least_tokens: int
    max_rows: int
    task: Task = Task.GENERATE
    takes_pictures: bool = False
    remark: str = ""
    given_bytes: int | None = None
    raised_bytes: int = 0
    most_bytes: int | None = None

    @property
    def fixed_bytes(self) -> int:
        """Return what it takes before any request runs."""
        return self.weights.size_bytes + self.own.size_bytes

    @property
    def needed_bytes(self) -> int:
        """Return what must be free before it is loaded: one row of `least_tokens`, or what is
        given."""
        return self.needed_for(0)

    @property
    def unraised_bytes(self) -> int:
        """Return what it would need if no process of it had ever run out of memory."""
        return self.needed_bytes - self.raise_for(0)

    def needed_for(self, stream_tokens: int) -> int:
        """Return what must be free before it is loaded if an answer that has begun is that long."""
        if self.given_bytes is not None:
            return self.given_bytes
        return self._unraised_for(stream_tokens) + self.raise_for(stream_tokens)

    def raise_for(self, stream_tokens: int) -> int:
        """Return how much of `needed_for` is there because its processes ran out of memory."""
        if self.given_bytes is not None:
            return 0
        if self.most_bytes is None:
            return self.raised_bytes
        room_bytes = self.most_bytes - self._unraised_for(stream_tokens)
        return max(0, min(self.raised_bytes, room_bytes))

    @property
    def wanted_bytes(self) -> int:
        """Return what it takes at most: all of its rows, each of the whole context."""
        longest = self.context_tokens
        size_bytes = self.bytes_for(rows=self.max_rows, longest=longest)
        return self._limited(size_bytes + self.raise_for(longest))

    @property
    def is_measured(self) -> bool:
        """True if nothing that `needed_bytes` rests on is an estimate."""
        if self.given_bytes is not None:
            return True
        sources = (self.weights.source, self.own.source, self.layers_source)
        return Source.ESTIMATED not in sources

    def row_tokens(self, stream_tokens: int) -> int:
        """Return how long the one row is that is always reserved, if an answer that has begun is
        that long."""
        return min(max(self.least_tokens, stream_tokens), self.context_tokens)

    def bytes_for(self, *, rows: int, longest: int) -> int:
        """Return what it takes with that many rows, the longest of them of that many tokens."""
        return self.fixed_bytes + cache_bytes(self.layers, rows=rows, longest=longest)

    def tokens_in(self, size_bytes: int, *, rows: int = 1) -> int:
        """Return the longest context that rows can have in so much memory, weights and all; 0:
        none."""
        room = size_bytes - self.fixed_bytes
        return tokens_within(room, self.layers, rows=rows, most=self.context_tokens)

    def rows_in(self, size_bytes: int, *, longest: int) -> int:
        """Return how many rows of that length it has memory for, at most `max_rows`; 0: none."""
        room = size_bytes - self.fixed_bytes - self.raise_for(longest)
        if longest == 0 or room < 0:
            return 0
        one = cache_bytes(self.layers, rows=1, longest=longest)
        return self.max_rows if one == 0 else min(self.max_rows, room // one)

    def loaded_problem(self, ready: Ready) -> str:
        """Return what is wrong with the `memory` of the entry now that a worker has loaded it, a
        clause; empty if it is enough, or if the entry gives none.

        Args:
            ready: what the worker has measured; its process counts as there if it cannot measure
                that.
        """
        own = replace(self.own, source=Source.GIVEN)
        if ready.own_bytes is not None:
            own = Figure(size_bytes=ready.own_bytes, source=Source.MEASURED)
        weights = Figure(size_bytes=ready.active_bytes, source=Source.MEASURED)
        layers = tuple(ready.cache_layers)
        return replace(self, weights=weights, own=own, layers=layers, remark="").known_problem()

    def known_problem(self, *, is_measured_again: bool = False) -> str:
        """Return the same as `loaded_problem`, before a load. An estimate of the process may be
        too high, so it refuses nothing, but a hint allows for it.

        Args:
            is_measured_again: leaves out what was measured of its process, which differs a little
                from one load to the next.
        """
        if self.given_bytes is None:
            return ""
        longest = min(GROWTH_TOKENS, self.context_tokens)
        row_bytes = cache_bytes(self.layers, rows=1, longest=longest)
        own_bytes, source = self.own.size_bytes, self.own.source
        left_out = {Source.ESTIMATED, Source.MEASURED} if is_measured_again else {Source.ESTIMATED}
        least_bytes = self.weights.size_bytes
        least_bytes += 0 if source in left_out else own_bytes
        least_bytes += 0 if self.remark else row_bytes
        if self.given_bytes >= least_bytes:
            return ""
        spare_bytes = {
            Source.GIVEN: 0,
            Source.MEASURED: own_bytes // SPARE_SHARE,
            Source.ESTIMATED: own_bytes,
        }[source]
        about = "about " if source is Source.ESTIMATED else ""
        parts = {
            "its weights": (self.weights.size_bytes, ""),
            "its process": (own_bytes, about),
            "a short request": (row_bytes, ""),
        }
        takes = [
            f"{word}{size_text(size)} for {what}" for what, (size, word) in parts.items() if size
        ]
        enough_bytes = sum(size for size, _ in parts.values()) + spare_bytes
        return (
            f"its memory is {size_text(self.given_bytes)}, but it needs at least "
            f'{" + ".join(takes)}; set memory to "{size_text(enough_bytes)}" or more, or to "auto"'
        )

    def _unraised_for(self, stream_tokens: int) -> int:
        return self.bytes_for(rows=1, longest=self.row_tokens(stream_tokens))

    def _limited(self, size_bytes: int) -> int:
        return size_bytes if self.given_bytes is None else self.given_bytes


LEAST_SHARE = 10
"""An estimate is raised by at least a tenth of what it says besides the weights: they are known,
and what a process held when it died was last measured up to a second before."""


def raised(need: Need, *, planned_bytes: int, held_bytes: int) -> Need:
    """Return the need of a model once a process of it has run out of memory.

    It is higher by what that process held beyond the plan, and at least by a fixed share. It stays
    the same if the entry gives the memory, and if it is all that there may be.

    Args:
        planned_bytes: what the process was to hold at most.
        held_bytes: what it was last measured at, without what it kept for reuse.
    """
    besides_bytes = need.needed_bytes - need.weights.size_bytes
    more_bytes = max(held_bytes - planned_bytes, besides_bytes // LEAST_SHARE)
    higher = replace(need, raised_bytes=need.raised_bytes + more_bytes)
    # What has no effect is not remembered, nor is anything forgotten that has none at the moment.
    return replace(need, raised_bytes=max(need.raised_bytes, higher.raise_for(0)))


def bounded(
    needs: Mapping[ModelName, Need], pinned: Collection[ModelName], budget_bytes: int
) -> dict[ModelName, Need]:
    """Return the needs, each raised no further than it fits into the budget next to the pinned
    models. A model that fits as it was appraised still fits after any of them was raised.

    Args:
        needs: of the models, in the order of the configuration.
        pinned: the models that always hold what they need.
        budget_bytes: what all models may take together.
    """
    found = {}
    fixed_bytes = sum(need.unraised_bytes for name, need in needs.items() if name in pinned)
    left_bytes = budget_bytes - fixed_bytes
    others = (need.unraised_bytes for name, need in needs.items() if name not in pinned)
    largest_bytes = max((size for size in others if size <= left_bytes), default=0)
    for name, need in needs.items():
        if name in pinned:
            more_bytes = max(0, left_bytes - largest_bytes)
            found[name] = replace(need, most_bytes=need.unraised_bytes + more_bytes)
            left_bytes -= found[name].raise_for(0)
    for name, need in needs.items():
        if name not in pinned:
            found[name] = replace(need, most_bytes=max(0, left_bytes))
    return {name: found[name] for name in needs}


def pins_problem(pinned: Mapping[ModelName, int], budget_bytes: int) -> str:
    """Return what is wrong with a configuration whose pinned models exceed the budget; empty if
    nothing.
    """
    total = sum(pinned.values())
    if total <= budget_bytes:
        return ""
    names = listed(f"{name} ({size_text(size)})" for name, size in pinned.items())
    return (
        f"the pinned models {names} need {size_text(total)} together, but the memory budget is "
        f"{size_text(budget_bytes)}; unpin one, or raise supervisor.memory_budget"
    )


# ---------------------------------------------------------------- what all may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The memory that models share. No load makes what is reserved exceed it.

    Attributes:
        size_bytes: what the models may take together now.
        machine_bytes: what the machine has of the memory that models live in: the device's with
            CUDA, otherwise its RAM or the limit of its control group.
        reason: how it was found, a phrase: `15.60 GiB of RAM less a reserve of 2.00 GiB`.
        automatic_bytes: what would follow from the machine, if the configuration says something
            else; None: it says nothing.
        lowered_from_bytes: what they may take together otherwise, if others need so much memory
            that it is less now; None if it is not lowered.
        shortage: why it is lowered, a phrase; empty if it is not.
        is_short: whether others lack memory at this moment, so that models must give some back. A
            budget may stay lowered for longer: models keep what they have, and no more are loaded.
    """

    size_bytes: int
    machine_bytes: int
    reason: str
    automatic_bytes: int | None = None
    lowered_from_bytes: int | None = None
    shortage: str = ""
    is_short: bool = False

    @property
    def whole_bytes(self) -> int:
        """Return what the models may take together while memory is not short."""
        return self.size_bytes if self.lowered_from_bytes is None else self.lowered_from_bytes

    @property
    def kept_bytes(self) -> int:
        """Return what may stay reserved; idle models go until it is no more."""
        return self.size_bytes if self.is_short else self.whole_bytes

    def whole(self) -> Budget:
        """Return the same budget, not lowered."""
        return replace(
            self,
            size_bytes=self.whole_bytes,
            lowered_from_bytes=None,
            shortage="",
            is_short=False,
        )

    def lowered(self, size_bytes: int, shortage: str, *, is_short: bool) -> Budget:
        """Return as much of the same budget as there is now.

        Args:
            shortage: why it is less.
            is_short: whether others lack memory at this moment.
        """
        return replace(
            self,
            size_bytes=size_bytes,
            lowered_from_bytes=self.whole_bytes,
            shortage=shortage,
            is_short=is_short,
        )


CALM_S = 10.0
"""There must have been more room for so long before the budget is raised again."""

STEPS = 50
"""The budget changes in steps of this part of it, and is raised only if there is one to spare."""

STALLED_FACTOR = 2
"""While processes wait for memory, this many times as much is kept free."""


class Strain(Enum):
    """The system's own word about its memory."""

    EASY = auto()
    """It is not short, even if little seems to be available (macOS)."""
    UNSAID = auto()
    """The platform says nothing, so the bytes that are available decide."""
    STALLED = auto()
    """Processes wait for memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The memory of the machine, or of the control group that the daemon is in.

    Attributes:
        available_bytes: what could be allocated without swapping.
        kept_free_bytes: what models leave of that to all other programs.
        strain: what the system says besides.
        place: whose memory it is, a phrase: `on this machine`.
    """

    available_bytes: int
    kept_free_bytes: int
    strain: Strain = Strain.UNSAID
    place: str = "on this machine"

    @property
    def free_bytes(self) -> int:
        """Return what models may still take; below 0 if they hold too much."""
        return self.available_bytes - self._kept_bytes

    @property
    def shortage(self) -> str:
        """Return why there is less room for models than usual, a phrase."""
        sizes = f"{size_text(self.available_bytes)} is available {self.place}"
        waiting = ", processes wait for memory" if self.strain is Strain.STALLED else ""
        return f"{sizes}{waiting}, and {size_text(self._kept_bytes)} must stay free"

    @property
    def _kept_bytes(self) -> int:
        factor = STALLED_FACTOR if self.strain is Strain.STALLED else 1
        return factor * self.kept_free_bytes


@dataclass(slots=True)
class Pressure:
    """The lowering of the budget while other programs need memory.

    It follows the room for models down at once, and up after ten calm seconds in small steps, so
    that it does not follow every change.

    Attributes:
        limit_bytes: what is left of the budget; None: all of it.
        calm_since: since when there has been a step more room than that; None: there is not.
        floor_bytes: the least room since then.
    """

    limit_bytes: int | None = None
    calm_since: float | None = None
    floor_bytes: int = 0

    def sampled(
        self, budget: Budget, reading: Reading | None, held_bytes: int, now: float
    ) -> Budget:
        """Return what there is of the budget after memory was measured.

        Args:
            reading: of the machine; None: it cannot be read.
            held_bytes: what models hold now.
        """
        if reading is None or reading.strain is Strain.EASY:
            self.limit_bytes = None
            return budget.whole()
        self.follow(max(0, held_bytes + reading.free_bytes), budget.whole_bytes, now)
        if self.limit_bytes is None:
            return budget.whole()
        is_new = self.limit_bytes != budget.size_bytes
        shortage = reading.shortage if is_new else budget.shortage
        return budget.lowered(self.limit_bytes, shortage, is_short=reading.free_bytes < 0)

    def follow(self, room_bytes: int, whole_bytes: int, now: float) -> None:
        """Lower or raise the limit, as there is room for models now.

        Args:
            room_bytes: what models may hold together.
            whole_bytes: the budget that is not lowered.
        """
        step_bytes = max(1, whole_bytes // STEPS)
        limit_bytes = whole_bytes if self.limit_bytes is None else self.limit_bytes
        if room_bytes < limit_bytes:
            self.limit_bytes, self.calm_since = room_bytes // step_bytes * step_bytes, None
        elif self.limit_bytes is None or room_bytes - step_bytes <= limit_bytes:
            self.calm_since = None
        elif self.calm_since is None:
            self.calm_since, self.floor_bytes = now, room_bytes
        else:
            self.floor_bytes = min(self.floor_bytes, room_bytes)
            if now >= self.calm_since + CALM_S:
                raised_bytes = (self.floor_bytes - step_bytes) // step_bytes * step_bytes
                is_whole = self.floor_bytes - step_bytes >= whole_bytes
                self.limit_bytes = None if is_whole else max(limit_bytes, raised_bytes)
                self.calm_since = None

    def after_reload(self, before: Budget | None, after: Budget | None) -> Budget | None:
        """Return what there is of a budget that was read from the configuration."""
        if after is None:
            return None
        if before is None or self.limit_bytes is None or self.limit_bytes >= after.whole_bytes:
            self.limit_bytes = None
            return after
        return after.lowered(self.limit_bytes, before.shortage, is_short=before.is_short)


# ---------------------------------------------------------------- which models have room


class Room(NamedTuple):
    """There is room.

    Attributes:
        models: must go for it, and leaving out any one of them is not enough; empty: there is room
            as things are.
        spare_bytes: what is left then.
    """

    models: tuple[ModelName, ...]
    spare_bytes: int


def find_room(
    needed_bytes: int,
    *,
    budget_bytes: int,
    reserved: Mapping[ModelName, int],
    may_go: Sequence[ModelName],
) -> Room | None:
    """Return which models must go so that a model fits; None if it does not even if all go that
    may.

    Args:
        budget_bytes: what all models may take together.
        reserved: what is reserved for each model that is there; not for the one that asks.
        may_go: those of them that may go, the one that should go first at the beginning.
    """
    free_bytes = budget_bytes - sum(reserved.values())

    def left_bytes(going: Sequence[ModelName]) -> int:
        return free_bytes + sum(reserved[model] for model in going) - needed_bytes

    if left_bytes(()) >= 0:
        return Room((), left_bytes(()))
    enough = (count for count in range(1, len(may_go) + 1) if left_bytes(may_go[:count]) >= 0)
    count = next(enough, None)
    if count is None:
        return None
    # A large one that goes late may have made an earlier one's going needless.
    latest_first = fewest(list(may_go[:count])[::-1], lambda going: left_bytes(going) >= 0)
    going = tuple(latest_first[::-1])
    return Room(going, left_bytes(going))


def fewest(going: list[T], is_enough: Callable[[list[T]], bool]) -> list[T]:
    """Return those of `going`, which are enough together, without any that may as well stay: the
    first ones stay first."""
    for one in list(going):
        others = [other for other in going if other is not one]
        if is_enough(others):
            going = others
    return going


def equal_shares(free_bytes: int, wanted: Mapping[ModelName, int]) -> dict[ModelName, int]:
    """Return what each model gets of what is free: equal shares, and none more than it can use."""
    left_bytes, shares = max(0, free_bytes), {}
    # The one that can use least comes first: what it leaves of its share is for the others.
    order = sorted(wanted, key=lambda name: (wanted[name], name))
    for place, name in enumerate(order):
        part_bytes = left_bytes // (len(order) - place)
        shares[name] = max(0, min(wanted[name], part_bytes))
        left_bytes -= shares[name]
    return shares
