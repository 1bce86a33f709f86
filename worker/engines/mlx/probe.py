"""Finds out, at the end of a load, what rows do to each other in one pass.

mlx-lm's model types differ in how they handle padding and several rows. So three rows of different
lengths run together, the third of them joining late and one leaving early, through the code that
serves requests. Their tokens are forced: all follow one sequence of ids, each from a different
place in it. So a single row over a plain cache shows what each of them should give at each step,
and the logits are comparable even if rounding differs.

`mlx_way.py` draws the conclusion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences

from .new_row import NewRow
from .passes import Passes
from .prefill import LARGEST_CHUNK
from .sampling import RowDraws

LENGTHS = (2, 4, 3)
"""Lengths of the prompts in tokens: different, so that anything that pads must pad."""

TOKENS = (5, 3, 4)
"""Lengths of the answers: short, because a slow machine takes 0.1 s per token. The second row
leaves when the third has its first token; what that does to the others shows in their last two."""

CONTROL_LENGTH, CONTROL_TOKENS = 3, 3
"""Lengths of two equally long rows, which pad nothing: any difference is rounding."""

SEQUENCE_LENGTH = max(length + count for length, count in zip(LENGTHS, TOKENS, strict=True))

STARTS = (0.5, 0.8, 0.2)
"""Starts of sequences of ids, as shares of the vocabulary."""

Rows = dict[int, list[mx.array]]
"""Log-probabilities of each token of each row, by the row's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Prompts and forced answers.

    Attributes:
        prompts: ids of each row.
        answers: ids that each row draws, whatever its logits say.
    """

    prompts: list[list[int]]
    answers: list[list[int]]


Scenario = Callable[[Passes, Script, Callable[[], None]], Rows]
"""Runs a script in some passes and calls the third after each step."""


def make_script(sequence: Sequence[int], lengths: Sequence[int], tokens: Sequence[int]) -> Script:
    """Rows that follow a sequence, with these numbers of ids for the prompt and the answer."""
    return Script(
        prompts=[list(sequence[:length]) for length in lengths],
        answers=[
            list(sequence[length : length + count])
            for length, count in zip(lengths, tokens, strict=True)
        ],
    )


def make_sequence(vocabulary_size: int, start: float = STARTS[0]) -> list[int]:
    """Ids spread over the vocabulary, the same in every load.

    Args:
        vocabulary_size: the ids are below it.
        start: from 0 up to 1; other sequences for other values.
    """
    return list(islice(_spread(vocabulary_size, start), SEQUENCE_LENGTH))


def _spread(vocabulary_size: int, place: float) -> Iterator[int]:
    """Steps by the golden section visit a range evenly and come back late."""
    while True:
        place = (place + 0.6180339887498949) % 1.0
        yield int(place * vocabulary_size)


class Run:
    """One script in some passes, row by row as the caller says.

    Attributes:
        got: what every row has given so far.

    Args:
        passes: passes without rows.
        script: the rows' script.
        report: called after each step, because the load progresses.
    """

    def __init__(self, passes: Passes, script: Script, report: Callable[[], None]) -> None:
        self._passes = passes
        self._script = script
        self._report = report
        self._places: dict[int, int] = {}
        self._waiting: set[int] = set()
        self.got: Rows = {}

    def insert(self, *places: int) -> None:
        """Adds rows of the script."""
        for place in places:
            answer = self._script.answers[place]
            uid = self._passes.insert(
                NewRow(
                    tokens=list(self._script.prompts[place]),
                    known=[],
                    cache=None,
                    max_tokens=len(answer),
                    draws=RowDraws(forced=answer),
                    stops=StopSequences(),
                )
            )
            self._places[uid] = place
            self._waiting.add(uid)
            self.got[place] = []

    def remove(self, place: int) -> None:
        """Takes a row out, as a cancelled one."""
        uids = [uid for uid, other in self._places.items() if other == place]
        self._passes.remove(uids, kept=())
        self._forget(*uids)

    def run_until(self, place: int, count: int) -> None:
        """Steps until a row has that many tokens."""
        while len(self.got[place]) < count:
            self.step()

    def step(self) -> None:
        """One step, in which every waiting prompt is read to its end."""
        reads, responses = self._passes.step(dict.fromkeys(self._waiting, LARGEST_CHUNK))
        self._waiting -= {read.uid for read in reads if read.is_over}
        for response in responses:
            self.got[self._places[response.uid]].append(response.logprobs)
            if response.finish_reason is not None:
                self._forget(response.uid)
        self._report()

    def _forget(self, *uids: int) -> None:
        for uid in uids:
            del self._places[uid]
            self._waiting.discard(uid)

    def clear(self) -> None:
        """Leaves no row."""
        self._passes.remove(list(self._places), kept=())
        self._forget(*list(self._places))


def run_alone(passes: Passes, script: Script, report: Callable[[], None]) -> Rows:
    """Runs the row that begins first by itself; the others are parts of what it gives.

    Its answer must reach as far in the sequence as theirs.
    """
    first = min(range(len(script.prompts)), key=lambda place: len(script.prompts[place]))
    run = Run(passes, script, report)
    run.insert(first)
    run.run_until(first, len(script.answers[first]))
    begin = len(script.prompts[first])
    return {
        place: run.got[first][len(prompt) - begin :][: len(script.answers[place])]
        for place, prompt in enumerate(script.prompts)
    }


def run_in_company(passes: Passes, script: Script, report: Callable[[], None]) -> Rows:
    """Two rows, then a third one, then without the second."""
    run = Run(passes, script, report)
    run.insert(0, 1)
    run.step()
    run.insert(2)
    run.run_until(2, 1)
    run.remove(1)
    run.run_until(2, len(script.answers[2]))
    run.clear()
    return run.got


def run_side_by_side(passes: Passes, script: Script, report: Callable[[], None]) -> Rows:
    """All rows from the first step to the last."""
    run = Run(passes, script, report)
    run.insert(*range(len(script.prompts)))
    run.run_until(0, len(script.answers[0]))
    run.clear()
    return run.got


def distance(got: mx.array, alone: mx.array) -> float:
    """How far one step's log-probabilities are from those of the row alone.

    The norm of the difference by the norm of what was expected, both around their mean: neither
    the size of a model's logits nor a constant in all of them matters. Entries that are no numbers
    alone are left out; infinite if others are none.
    """
    is_number = mx.isfinite(alone)
    if not mx.all(mx.isfinite(got) | ~is_number).item():
        return float("inf")
    count = mx.maximum(mx.sum(is_number), 1)

    def centre(values: mx.array) -> mx.array:
        kept = mx.where(is_number, values, 0.0)
        return mx.where(is_number, kept - mx.sum(kept) / count, 0.0)

    expected = centre(alone)
    size: Any = mx.linalg.norm(expected).item()
    difference: Any = mx.linalg.norm(centre(got) - expected).item()
    return float(difference / max(size, 1e-20))


def largest_distance(got: Rows, alone: Rows) -> float:
    """The largest distance of a row, as the smaller one of two successive steps.

    A single step may be far off where nothing is wrong: an expert is chosen otherwise, because
    the numbers are rounded differently. What the batch does wrong stays in the row's cache.
    """
    largest = 0.0
    for place, steps in got.items():
        each = [distance(*pair) for pair in zip(steps, alone[place], strict=False)]
        largest = max([largest, *(min(pair) for pair in pairwise(each))])
    return largest
