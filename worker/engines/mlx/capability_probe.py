"""Finds out which way of running rows changes no answer; see `protocol.states.Batching`.

It is measured at each load and not listed by model type, because a list would age with each
release of mlx-lm and cannot know configurations: `rope_type: dynamic` breaks any type.

mlx-lm's model types differ in how they handle padding and several rows. So three rows of different
lengths run together, the third of them joining late and one leaving early, through the code that
serves requests. Their tokens are forced: all follow one sequence of ids, each from a different
place in it. So a single row over a plain cache shows what each of them should give at each step,
and the logits are comparable even if rounding differs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlxsup.protocol.states import Batching
from mlxsup.protocol.text import log_line

from .batch_modes import BatchMode, make_mode
from .loader import MODEL_FAULTS, raise_if_passing, shorten
from .logits import FloatLogits
from .prefill import LARGEST_CHUNK
from .prompt_batch import NewRow
from .sampler import RowDraws

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


Scenario = Callable[[BatchMode, Script, Callable[[], None]], Rows]
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

    def __init__(self, passes: BatchMode, script: Script, report: Callable[[], None]) -> None:
        self._mode = passes
        self._script = script
        self._report = report
        self._places: dict[int, int] = {}
        self._waiting: set[int] = set()
        self.got: Rows = {}

    def insert(self, *places: int) -> None:
        """Adds rows of the script."""
        for place in places:
            answer = self._script.answers[place]
            uid = self._mode.insert(
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
        self._mode.remove(uids, kept=())
        self._forget(*uids)

    def run_until(self, place: int, count: int) -> None:
        """Steps until a row has that many tokens."""
        while len(self.got[place]) < count:
            self.step()

    def step(self) -> None:
        """Run one step, in which every waiting prompt is read to its end."""
        reads, responses = self._mode.step(dict.fromkeys(self._waiting, LARGEST_CHUNK))
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
        self._mode.remove(list(self._places), kept=())
        self._forget(*list(self._places))


def run_alone(passes: BatchMode, script: Script, report: Callable[[], None]) -> Rows:
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


def run_in_company(passes: BatchMode, script: Script, report: Callable[[], None]) -> Rows:
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


def run_side_by_side(passes: BatchMode, script: Script, report: Callable[[], None]) -> Rows:
    """Run all rows from the first step to the last."""
    run = Run(passes, script, report)
    run.insert(*range(len(script.prompts)))
    run.run_until(0, len(script.answers[0]))
    run.clear()
    return run.got


def distance(got: mx.array, alone: mx.array) -> float:
    """Return the distance of one step's log-probabilities from those of the row alone.

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
    """Return the largest distance of a row, as the smaller one of two successive steps.

    A single step may be far off where nothing is wrong: an expert is chosen otherwise, because
    the numbers are rounded differently. What the batch does wrong stays in the row's cache.
    """
    largest = 0.0
    for place, steps in got.items():
        each = [distance(*pair) for pair in zip(steps, alone[place], strict=False)]
        largest = max([largest, *(min(pair) for pair in pairwise(each))])
    return largest


logger = logging.getLogger(__name__)

PROBE_VERSION = "4"
"""Changes when the same model may be run in another way, and so answer differently."""

ONLY_ROW = "max_concurrency is 1"
TOO_SHORT = "context_length is too short to try another way"
UNTRIED = (ONLY_ROW, TOO_SHORT)
"""Why a pass has one row although nothing is known about the model; each load finds out again."""

UNSEEN: dict[str, str] = {
    "minimax_m3_vl": "its attention selects blocks of tokens and counts the padding",
    "recurrent_gemma": "its first token is computed differently if the batch already has a state",
}
"""By model type: what only shows in prompts that are longer or shorter than those of the probe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How far log-probabilities may be from those of the row alone (`mlx_probe.distance`).

    Attributes:
        floor: a difference that is always allowed.
        cap: a difference that is never allowed, however much the control differs: a model that
            mixes rows of equal length is wrong, not noisy.
        sequences: of ids that rows must differ in, each: a fault does, and a router that once
            chooses another expert does not.
    """

    floor: float
    cap: float
    sequences: int


EXACT = Tolerance(floor=1e-3, cap=1e-2, sequences=1)
"""float32 on the CPU. Of tiny models of all types, right rows differ by 2e-6 at most and wrong
ones by 2e-2 at least."""

ROUNDED = Tolerance(floor=2e-2, cap=1.5e-1, sequences=3)
"""All else: bfloat16, float16, quantised weights under them, and float32 on a GPU, where a product
of matrices has 10 bits. Right rows differ by 8e-3 at most in bfloat16 on the CPU; on a GPU by 2e-2
in bfloat16 and 3e-2 in float32, and by up to 1e-1 if a router chooses otherwise. Wrong ones differ
by 7e-2 at least."""

CONTROL_MULTIPLE = 4.0
"""How much more rows of different length may differ than those of equal length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe found.

    Attributes:
        way: the way that changes no answer.
        reason: why it is not TOGETHER; empty if it is.
    """

    way: Batching
    reason: str = ""


def log_finding(finding: Finding, model: str, seconds: float) -> None:
    """Says in the log how rows of a model are run; a warning if that is not as configured."""
    if finding.way is Batching.TOGETHER or finding.reason == ONLY_ROW:
        logger.info(
            log_line("rows run as configured", model=model, way=finding.way, seconds=seconds)
        )
        return
    logger.warning(
        log_line(
            "rows may not share all passes",
            model=model,
            way=finding.way,
            reason=finding.reason,
            seconds=seconds,
        )
    )


def has_state(cache: list[Any]) -> bool:
    """True if a layer keeps a state instead of keys and values: padding would go into it, and some
    model types of mlx-lm do not mask it."""
    return any(
        isinstance(layer, ArraysCache)
        or (isinstance(layer, CacheList) and has_state(list(layer.caches)))
        for layer in cache
    )


class CapabilityProbe:
    """Tries the ways in turn, fastest first; the last one needs no trial.

    Args:
        model: the materialised model.
        model_type: as in config.json; named in reasons.
        stream: made on this thread.
        is_exact: whether float32 is computed as such here: on the CPU.
        max_concurrency: how many rows there may be.
        context_length: how many tokens a row may have.
        vocabulary_size: valid ids are below it.
        report: called after each step, because the load progresses.
    """

    def __init__(
        self,
        model: FloatLogits,
        *,
        model_type: str,
        stream: mx.Stream,
        is_exact: bool,
        max_concurrency: int,
        context_length: int,
        vocabulary_size: int,
        report: Callable[[], None],
    ) -> None:
        self._model = model
        self._model_type = model_type
        self._stream = stream
        self._is_exact = is_exact
        self._max_concurrency = max_concurrency
        self._context_length = context_length
        self._vocabulary_size = vocabulary_size
        self._report = report
        self._alone: dict[float, Rows] = {}  # by the start of the sequence

    def find(self) -> Finding:
        """Find the fastest way in which rows do not change each other.

        Raises:
            MemoryError, GpuFaultElsewhereError: see `raise_if_passing`.
            Exception: a row alone raises it.
        """
        if self._max_concurrency == 1:
            return Finding(way=Batching.ONE_ROW, reason=ONLY_ROW)
        if self._context_length < SEQUENCE_LENGTH:
            return Finding(way=Batching.ONE_ROW, reason=TOO_SHORT)
        self._run_alone(STARTS[0])  # an error here is not the fault of a way
        trials, reason = self._trials()
        for way in trials:
            fault = self._fault(way)
            if not fault:
                return Finding(way=way, reason=reason)
            reason = fault
        return Finding(way=Batching.ONE_ROW, reason=reason)

    def _trials(self) -> tuple[list[Batching], str]:
        """Return the ways to try, and why the fastest is not among them."""
        if self._model_type in UNSEEN:
            return [], f"{UNSEEN[self._model_type]} ({self._model_type})"
        if has_state(make_prompt_cache(self._model)):
            reason = f"its layers keep a state, which padding may change ({self._model_type})"
            return [Batching.SERIAL_PREFILL], reason
        return [Batching.TOGETHER, Batching.SERIAL_PREFILL], ""

    def _fault(self, way: Batching) -> str:
        """Return why rows cannot be computed in this way; empty if they can."""
        what = "read together" if way is Batching.TOGETHER else "decoded together"
        starts = STARTS[: self._tolerance.sequences]
        try:
            is_wrong = all(self._is_wrong(way, start) for start in starts)
        except MODEL_FAULTS as error:
            raise_if_passing(error)
            return f"rows cannot be {what} ({self._model_type}): {shorten(error)}"
        if is_wrong:
            return f"rows of different length change each other when {what} ({self._model_type})"
        return ""

    def _is_wrong(self, way: Batching, start: float) -> bool:
        tolerance = self._tolerance
        alone = self._run_alone(start)
        company = self.run(way, run_in_company, self._script(start, LENGTHS, TOKENS))
        with mx.stream(self._stream):
            found = largest_distance(company, alone)
        if found <= tolerance.floor:
            return False
        return found > min(CONTROL_MULTIPLE * self._noise(way, start), tolerance.cap)

    def _run_alone(self, start: float) -> Rows:
        if start not in self._alone:
            script = self._script(start, LENGTHS, TOKENS)
            self._alone[start] = self.run(Batching.ONE_ROW, run_alone, script)
        return self._alone[start]

    def _noise(self, way: Batching, start: float) -> float:
        """Measure how much rows of equal length differ from what they are alone."""
        script = self._script(start, (CONTROL_LENGTH,) * 2, (CONTROL_TOKENS,) * 2)
        alone = self.run(Batching.ONE_ROW, run_alone, script)
        company = self.run(way, run_side_by_side, script)
        with mx.stream(self._stream):
            return largest_distance(company, alone)

    def _script(self, start: float, lengths: Sequence[int], tokens: Sequence[int]) -> Script:
        """Make a script of ids that the model knows: a tokenizer may have more."""
        with mx.stream(self._stream):
            # The shape is known without computing anything.
            logits = self._model(mx.array([[0]]), cache=make_prompt_cache(self._model))
        sequence = make_sequence(min(self._vocabulary_size, logits.shape[-1]), start)
        return make_script(sequence, lengths, tokens)

    @property
    def _tolerance(self) -> Tolerance:
        return EXACT if self._is_exact and self._model.own_dtype == mx.float32 else ROUNDED

    def run(self, way: Batching, scenario: Scenario, script: Script) -> Rows:
        """Run a script in one way, in separate passes; return what its rows give."""
        passes = make_mode(way, self._model, stream=self._stream)
        try:
            with mx.stream(self._stream):
                return scenario(passes, script, self._report)
        finally:
            passes.close()
