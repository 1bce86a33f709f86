"""What is tried on every model type, each through the engine; one function for each scenario.

The measure is the same engine with one row at a time and nothing known beforehand; `alone` holds
that to mlx-lm itself.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engine import EngineFacts, Row, RowLogprobs, RowToken
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.loader import shorten
from mlxsup.worker.engines.mlx.logprobs import LEAST_LOGPROB
from mlxsup.worker.engines.mlx.prefill import CostModel

from .build import make_model
from .listed import ModelType
from support.models.tiny_model import VOCABULARY_SIZE
from support.worker.mlx_rows import loaded_engine, make_row, make_spec

LENGTHS = (1, 7, 40, 100)
"""Of the prompts: none, less, more and much more than a window of 16."""
TOKENS = 24
TOP = 5
CHUNK = 256
SMALL_CHUNK = 16
CACHE_BYTES = 64 * 1024 * 1024

Answer = list[RowToken]


BOUND = 1e-3
"""By how much a log-probability in float32 may differ for the answers to count as equal."""


class Kind(StrEnum):
    """What came out of a trial."""

    BITS = "bits"
    ROUNDING = "rounding"
    WRONG = "WRONG"
    RAISED = "RAISED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of one trial.

    Attributes:
        kind: of the result.
        difference: the largest one between two log-probabilities; infinite if ids differ.
        detail: the exception, or what is wrong first.
    """

    kind: Kind
    difference: float = 0.0
    detail: str = ""

    @property
    def is_right(self) -> bool:
        """True if the answers are equal but for rounding."""
        return self.kind in (Kind.BITS, Kind.ROUNDING)

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}" if self.detail else str(self.kind)


def compare(name: str, got: Sequence[RowToken], wanted: Sequence[RowToken]) -> Verdict:
    """Compare an answer, which a cancel may have cut off, with the one it should be."""
    worst = 0.0
    is_same = True
    for place, (mine, theirs) in enumerate(zip(got, wanted, strict=False)):
        if (mine.token, mine.finish) != (theirs.token, theirs.finish):
            return Verdict(
                kind=Kind.WRONG,
                difference=math.inf,
                detail=f"{name}: token {place} is {mine.token}, not {theirs.token}",
            )
        if mine.logprobs is None or theirs.logprobs is None:
            continue
        is_same = is_same and mine.logprobs == theirs.logprobs
        mine_values = [mine.logprobs.logprob, *(value for _, value in mine.logprobs.top)]
        their_values = [theirs.logprobs.logprob, *(value for _, value in theirs.logprobs.top)]
        if not all(LEAST_LOGPROB < value <= 0.0 for value in mine_values + their_values):
            return Verdict(kind=Kind.WRONG, detail=f"{name}: token {place} has no probability")
        # The likeliest tokens by place: equally likely ones may change places.
        pairs = zip(mine_values, their_values, strict=True)
        worst = max(worst, *(abs(one - other) for one, other in pairs))
    if len(got) > len(wanted):
        return Verdict(kind=Kind.WRONG, detail=f"{name}: {len(got)} tokens, not {len(wanted)}")
    if worst > BOUND:
        return Verdict(kind=Kind.WRONG, difference=worst, detail=f"{name}: differs by {worst:.0e}")
    kind = Kind.BITS if is_same else Kind.ROUNDING
    return Verdict(kind=kind, difference=worst)


def worst_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what matters: what is not right before what is, then the largest difference."""
    order = list(Kind)
    return max(verdicts, key=lambda v: (order.index(v.kind), v.difference))


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """Return random ids, the same each time."""
    random = np.random.default_rng([seed, length])
    return [int(number) for number in random.integers(0, VOCABULARY_SIZE, length)]


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    """Read prompts in chunks of one size, whatever the machine's speed."""
    with mock.patch.object(CostModel, "chunk", return_value=size):
        yield


@dataclass(slots=True)
class Session:
    """Rows in one engine, and what each got so far."""

    engine: MlxEngine
    got: dict[int, Answer] = field(default_factory=dict)

    def insert(self, row: Row) -> int:
        """Add a row; return how many of its tokens are known."""
        self.got[int(row.key)] = []
        return self.engine.insert(row)

    def run_until(self, key: int, count: int) -> None:
        """Step until a row has that many tokens, or nothing is left to do."""
        while self.engine.row_count() and len(self.got[key]) < count:
            self._step()

    def cancel(self, key: int) -> None:
        """Take a row out, ended or not."""
        self.engine.remove(RequestKey(key))

    def run(self) -> dict[int, Answer]:
        """Step until nothing is left to do; return all that was got."""
        while self.engine.row_count():
            self._step()
        return self.got

    def _step(self) -> None:
        for token in self.engine.step().tokens:
            self.got[int(token.key)].append(token)


class Trial:
    """One model folder: its engine, and what each prompt is answered alone.

    An engine that has raised is abandoned, and another one loaded for what is tried next.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._engine: MlxEngine | None = None
        self._alone: dict[tuple[float, ...], Answer] = {}

    def load(self) -> EngineFacts:
        """Load the engine; return what it found out."""
        self._engine = MlxEngine(make_spec(self.folder))
        return self._engine.load(lambda phase, progress: None)

    def session(self) -> Session:
        """Return an empty one, in an engine that keeps no prompt."""
        if self._engine is None:
            self.load()
        assert self._engine is not None
        return Session(self._engine)

    @contextmanager
    def session_with_cache(self) -> Iterator[Session]:
        """Open an empty one, in its own engine, which keeps prompts."""
        self.close()
        with loaded_engine(self.folder, prefix_cache_bytes=CACHE_BYTES) as engine:
            yield Session(engine)

    def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        gc.collect()

    def abandon(self) -> None:
        """Drop an engine that has raised: what is left in it cannot even be taken out."""
        self._engine = None
        gc.collect()

    def row(self, key: int, length: int, **changes: Any) -> Row:
        """Return a row over the prompt of a length."""
        return make_row(key, prompt(length), TOKENS, top_logprobs=TOP, **changes)

    def alone(self, length: int, **sampling: Any) -> Answer:
        """Return the answer to the prompt of a length, alone in the engine."""
        key = (length, *sampling.values())
        if key not in self._alone:
            self._alone[key] = self.answer(self.row(length, length, **sampling))
        return self._alone[key]

    def answer_to(self, tokens: list[int]) -> Answer:
        """Return the greedy answer to a prompt, alone in the engine."""
        return self.answer(make_row(0, tokens, TOKENS, top_logprobs=TOP))

    def answer(self, row: Row) -> Answer:
        """Return the answer of a row, alone in the engine."""
        session = self.session()
        session.insert(row)
        return session.run()[int(row.key)]

    def compare(self, got: dict[int, Answer]) -> Verdict:
        """Compare rows, whose keys are the lengths of their prompts, with each alone."""
        return worst_of(
            [compare(f"prompt of {key}", answer, self.alone(key)) for key, answer in got.items()]
        )

    def model(self) -> Any:
        """Return the model as mlx-lm loads it."""
        return load_model(self.folder)[0]


def alone(trial: Trial) -> Verdict:
    """One row at a time gives what mlx-lm gives, with the model's own cache."""
    answers = {length: trial.alone(length) for length in LENGTHS}
    model = trial.model()
    return worst_of(
        [
            compare(f"prompt of {length}", answer, _by_mlx_lm(model, prompt(length)))
            for length, answer in answers.items()
        ]
    )


def _by_mlx_lm(model: Any, tokens: list[int]) -> Answer:
    steps = generate_step(
        mx.array(tokens),
        model,
        max_tokens=TOKENS,
        sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
        prompt_cache=make_prompt_cache(model),
    )
    answer: Answer = []
    for token, logprobs in steps:
        # As the worker does: mlx-lm's own are off by the rounding of a logarithmic sum.
        logprobs = logprobs.astype(mx.float32).reshape(-1)
        values = np.array(logprobs - mx.logsumexp(logprobs))
        top = np.argsort(-values, kind="stable")[:TOP]
        answer.append(
            RowToken(
                key=RequestKey(0),
                token=int(token),
                logprobs=RowLogprobs(
                    logprob=float(values[int(token)]),
                    top=[(int(place), float(values[place])) for place in top],
                ),
            )
        )
    return [*answer[:-1], replace(answer[-1], finish=FinishReason.LENGTH)]


def batched(trial: Trial) -> Verdict:
    """Four rows that begin together."""
    session = trial.session()
    for length in LENGTHS:
        session.insert(trial.row(length, length))
    return trial.compare(session.run())


def late(trial: Trial) -> Verdict:
    """Rows that join while others decode or read their prompts, in chunks of 16, and rows that
    leave in their prompt, in their answer, and as the last but one."""
    session = trial.session()
    left = -1
    with chunks_of(SMALL_CHUNK):
        session.insert(trial.row(40, 40))
        session.run_until(40, 4)
        session.insert(trial.row(100, 100))
        session.insert(make_row(left, prompt(90, seed=1), TOKENS))
        session.run_until(40, 6)
        session.cancel(left)
        session.run_until(100, 2)
        for length in (7, 23, 1):
            session.insert(trial.row(length, length))
        session.run_until(7, 3)
        session.cancel(100)
        got = session.run()
    del got[left]
    return trial.compare(got)


def chunks(trial: Trial) -> Verdict:
    """Prompts that are read in chunks of 16, one row at a time."""
    got: dict[int, Answer] = {}
    with chunks_of(SMALL_CHUNK):
        for length in (40, 100):
            got[length] = trial.answer(trial.row(length, length))
    return trial.compare(got)


def resume(trial: Trial) -> Verdict:
    """Answers of which a part was delivered, first alone, then beside others."""
    delivered = {7: 5, 40: 10, 100: 20}
    rests = {length: trial.alone(length)[count:] for length, count in delivered.items()}
    rows = [
        trial.row(length, length, delivered=[t.token for t in trial.alone(length)[:count]])
        for length, count in delivered.items()
    ]
    verdicts = [compare("alone", trial.answer(row), rests[int(row.key)]) for row in rows]
    session = trial.session()
    for row in rows:
        session.insert(row)
    got = session.run()
    verdicts += [compare("beside others", got[key], rest) for key, rest in rests.items()]
    return worst_of(verdicts)


def seeded(trial: Trial) -> Verdict:
    """Four rows, each drawn with its own seed.

    Among few tokens: a draw between two of thousands changes with the last bit of any of them.
    """
    sampling = {n: {"temperature": 0.8, "top_k": 8, "seed": n} for n in LENGTHS}
    session = trial.session()
    for length, drawn in sampling.items():
        session.insert(trial.row(length, length, **drawn))
    return worst_of(
        [
            compare(f"prompt of {length}", answer, trial.alone(length, **sampling[length]))
            for length, answer in session.run().items()
        ]
    )


def second_turn(trial: Trial) -> Verdict:
    """A prompt that continues an answered one."""
    tokens = prompt(40)
    answered = [token.token for token in trial.alone(40) if token.token is not None]
    follow_up = [*tokens, *answered, *prompt(7)]
    wanted = trial.answer_to(follow_up)
    with trial.session_with_cache() as session:
        session.insert(trial.row(1, 40, checkpoints=(39,)))
        session.run()
        session.insert(make_row(2, follow_up, TOKENS, top_logprobs=TOP))
        return compare("second turn", session.run()[2], wanted)


def shared_prefix(trial: Trial) -> Verdict:
    """Prompts that begin like an answered one of 100 tokens: 60 and 17 tokens of it, the first of
    which was named as likely to be shared."""
    first = prompt(100)
    others = {2: [*first[:60], *prompt(20, seed=2)], 3: [*first[:17], *prompt(20, seed=3)]}
    wanted = {key: trial.answer_to(tokens) for key, tokens in others.items()}
    verdicts: list[Verdict] = []
    with trial.session_with_cache() as session:
        session.insert(trial.row(1, 100, checkpoints=(60,)))
        session.run()
        for key, tokens in others.items():
            cached = session.insert(make_row(key, tokens, TOKENS, top_logprobs=TOP))
            answer = session.run()[key]
            verdicts.append(compare(f"shares {cached}", answer, wanted[key]))
    return worst_of(verdicts)


SCENARIOS: dict[str, Callable[[Trial], Verdict]] = {
    "alone": alone,
    "batched": batched,
    "late": late,
    "chunks": chunks,
    "resume": resume,
    "seeded": seeded,
    "second turn": second_turn,
    "shared prefix": shared_prefix,
}
"""Those that need their own engine come last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What was found out of a model type.

    Attributes:
        caches: kinds of cache of its layers, those within lists too.
        load: `ok`, or why it does not load.
        batching: how its rows run; None if it does not load.
        verdicts: by scenario; empty if it does not load.
    """

    caches: str
    load: str
    batching: Batching | None = None
    verdicts: dict[str, Verdict] = field(default_factory=dict)


def try_model_type(model_type: ModelType, scenarios: Sequence[str] = ()) -> Result:
    """Build a model, load it, and run scenarios, all of them unless some are named."""
    kinds, verdicts = "", {}
    with tempfile.TemporaryDirectory() as parent:
        trial = Trial(Path(parent) / model_type.name)
        try:
            make_model(trial.folder, model_type)
            kinds = kinds_of_cache(trial.model())
            facts = trial.load()
        except Exception as error:  # noqa: BLE001  (whatever a load raises is its row's result)
            trial.close()
            return Result(caches=kinds, load=f"{type(error).__name__}: {shorten(error)}")
        with chunks_of(CHUNK):
            for scenario in scenarios or SCENARIOS:
                try:
                    verdicts[scenario] = SCENARIOS[scenario](trial)
                except Exception as error:  # noqa: BLE001  (it is its cell's result)
                    trial.abandon()
                    detail = f"{type(error).__name__}: {shorten(error)}"
                    verdicts[scenario] = Verdict(kind=Kind.RAISED, detail=detail)
        trial.close()
    return Result(caches=kinds, load="ok", batching=facts.batching, verdicts=verdicts)


def kinds_of_cache(model: object) -> str:
    """Return the kinds of cache that a model makes for itself, without the word `Cache`."""
    waiting = list(make_prompt_cache(model))
    kinds: set[str] = set()
    while waiting:
        cache = waiting.pop()
        inner = getattr(cache, "caches", None)
        kinds.add(type(cache).__name__.removesuffix("Cache") or "plain")
        waiting.extend(inner or ())
    return ", ".join(sorted(kinds))
