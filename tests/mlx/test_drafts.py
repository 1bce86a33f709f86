"""Rows that guess: their answers are those without drafts, whatever is guessed."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxsup.client import RequestError
from mlxsup.protocol.cache_cost import cache_bytes
from mlxsup.protocol.ids import ModelName, unpack_tokens
from mlxsup.protocol.launch import ExitCode, LaunchSettings
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.supervisor.core.budget import Need
from mlxsup.supervisor.core.settings import ModelSettings
from mlxsup.supervisor.memory.measurements import Measurements
from mlxsup.supervisor.memory.needs import needs_without_daemon
from mlxsup.worker.engine import (
    BadLaunchError,
    BadModelError,
    Guessed,
    ModelMissingError,
    Row,
    RowToken,
)
from mlxsup.worker.engines.mlx import draft_model, drafts
from mlxsup.worker.engines.mlx.caches import MOST_PADDING
from mlxsup.worker.engines.mlx.draft_model import CHUNK, CONTEXT, DraftModel, DraftRow, DraftRows
from mlxsup.worker.engines.mlx.drafts import (
    GRAM,
    INDEXED,
    LEAST_MEASUREMENTS,
    LENT,
    LONGEST_MATCH,
    MEASUREMENTS,
    MODEL_LENT,
    NO_GUESS,
    PAUSE,
    RENEWED,
    SAVED,
    SPENT,
    Drafts,
    NgramIndex,
    Pacer,
)
from mlxsup.worker.engines.mlx.engine import MlxEngine
from mlxsup.worker.engines.mlx.folder import check_folder
from mlxsup.worker.engines.mlx.loader import iterate_arrays, load_lazily, materialise
from mlxsup.worker.engines.mlx.logits import FloatLogits
from mlxsup.worker.engines.mlx.sampler import PLAIN, BatchSampler, draw_by_share

from support.client.streams import Reader
from support.daemon.daemon import Daemon, row
from support.model_types.build import make_model
from support.model_types.listed import MODEL_TYPES, UNLOADABLE
from support.model_types.scenarios import BOUND, chunks_of, compare, prompt
from support.models.adapters import make_adapter
from support.models.tiny_model import VOCABULARY_SIZE, add_tokens, make_tiny_model
from support.worker.loop_driver import Answer, LoopDriver, check_every_resume
from support.worker.mlx_rows import (
    check_no_row_is_left,
    known_as,
    loaded_engine,
    make_row,
    make_spec,
    run_rows,
    token_ids,
)

pytestmark = [pytest.mark.mlx, pytest.mark.timeout(600)]

TOKENS = 16

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "seed": 9, "logit_bias": {5: 2.0},
     "min_tokens": 9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "temperature": 0.7, "seed": 2},
)  # fmt: skip

Answers = dict[int, list[RowToken]]


def rows_of(kinds: Sequence[dict[str, Any]] = KINDS) -> list[Row]:
    return [
        make_row(key, prompt(7 + 9 * key), TOKENS - key, top_logprobs=5, **kind)
        for key, kind in enumerate(kinds)
    ]


def alone(engine: MlxEngine, rows: Sequence[Row]) -> Answers:
    return {int(row.key): run_rows(engine, [row])[int(row.key)] for row in rows}


def texts_of(rows: Sequence[Row], answers: Answers) -> list[list[int]]:
    return [row.tokens + token_ids(answers[int(row.key)]) for row in rows]


def check_same(got: Answers, wanted: Answers, bound: float = 1e-4) -> None:
    for key, answer in wanted.items():
        verdict = compare(f"row {key}", got[key], answer)
        assert verdict.is_right, str(verdict)
        assert verdict.difference <= bound, str(verdict)
        assert len(got[key]) == len(answer)


@contextmanager
def guessing_by_text(texts: Sequence[Sequence[int]], *, has_errors: bool = True) -> Iterator[None]:
    """Let rows whose tokens begin one of these texts look up how it goes on, with an error every
    few places, so that a pass accepts none, some or all of a guess."""

    def follow(self: NgramIndex, tokens: Sequence[int], pending: Sequence[int]) -> list[Any]:
        self.place = self.length = GRAM
        return []

    def guess(
        self: NgramIndex, tokens: Sequence[int], pending: Sequence[int], most: int
    ) -> list[int]:
        text, begin = _beginning(texts, [*tokens, *pending])
        places = range(begin, min(begin + max(most, 0), len(text)))
        return [_with_errors(text, place) if has_errors else text[place] for place in places]

    with (
        mock.patch.object(NgramIndex, "follow", follow),
        mock.patch.object(NgramIndex, "guess", guess),
    ):
        yield


@contextmanager
def guessing(*texts: Sequence[int], is_same: bool = True) -> Iterator[None]:
    """Let rows guess in every step, see `guessing_by_text`.

    A draft model is asked before, and has to say how the text goes on if it is the same one.
    """
    missed: list[tuple[int, list[int], Sequence[int]]] = []

    def say(self: DraftRows, rows: dict[int, DraftRow], most: int) -> dict[int, list[int]]:
        said = ask(self, rows, most)
        for uid, own in said.items():
            text, begin = _beginning(texts, [*rows[uid].tokens, rows[uid].pending])
            if is_same and own[: len(text) - begin] != list(text[begin : begin + most]):
                missed.append((begin, own, text[begin : begin + most]))
            places = range(begin, min(begin + most, len(text)))
            said[uid] = [_with_errors(text, place) for place in places]
        return said

    def choose(self: Pacer, lengths: Sequence[int], rows: int, **named: Any) -> tuple[int, float]:
        return (self.most, -1.0 if self._learns_alone else 0.0) if lengths else NO_GUESS

    ask = DraftRows.guess
    with (
        guessing_by_text(texts),
        mock.patch.object(Pacer, "choose", choose),
        mock.patch.object(DraftRows, "guess", say),
    ):
        yield
    assert not missed, "the draft model has not read what the row has drawn"


def _beginning(texts: Sequence[Sequence[int]], begin: list[int]) -> tuple[Sequence[int], int]:
    """Return the text that begins like this, and where it goes on."""
    for text in texts:
        if list(text[: len(begin)]) == begin:
            return text, len(begin)
    return (), 0


def _with_errors(text: Sequence[int], place: int) -> int:
    """Return the token at a place, or another one at every third or fourth, in each text others."""
    is_error = (place * 7 + sum(text[:3])) % 10 in (0, 3, 7)
    return (text[place] + 1) % VOCABULARY_SIZE if is_error else text[place]


class Counted:
    """Steps of an engine until no row is left."""

    def __init__(self, engine: MlxEngine) -> None:
        self._engine = engine
        self.got: Answers = {}
        self.steps = self.read = self.accepted = 0
        self.shares: dict[int, set[int]] = {}  # how many guesses of a row passes have accepted
        self.most_guessing = 0  # rows of a step
        self.inside: dict[int, list[int]] = {}  # numbers of tokens of a row that end within a pass

    def step(self) -> None:
        result = self._engine.step()
        self.steps += 1
        before = {key: len(answer) for key, answer in self.got.items()}
        self.most_guessing = max(self.most_guessing, len(result.guessed or {}))
        for key, one in (result.guessed or {}).items():
            self.read += one.read
            self.accepted += one.accepted
            self.shares.setdefault(int(key), set()).add(one.accepted)
        for token in result.tokens:
            self.got.setdefault(int(token.key), []).append(token)
        for number, answer in self.got.items():
            inside = range(before.get(number, 0) + 1, len(answer))
            self.inside.setdefault(number, []).extend(inside)
        self._engine.settle()

    def run(self) -> Answers:
        while self._engine.row_count():
            self.step()
        return self.got


# ---------------------------------------------------------------- the same answers


@pytest.fixture(scope="module", params=[Batching.TOGETHER, Batching.ONE_ROW])
def known(request: pytest.FixtureRequest, tiny: Path) -> dict[str, str]:
    return known_as(tiny, request.param)


@pytest.fixture(scope="module")
def plain(tiny: Path, known: dict[str, str]) -> Answers:
    with loaded_engine(tiny, known_batching=known) as engine:
        return alone(engine, rows_of())


@pytest.fixture(scope="module", params=["ngram", "model"])
def source(request: pytest.FixtureRequest, tiny: Path) -> str:
    """What the configuration says of drafts: the draft model is the model itself."""
    return "ngram" if request.param == "ngram" else str(tiny)


@pytest.fixture(scope="module")
def engine(tiny: Path, known: dict[str, str], source: str) -> Iterator[MlxEngine]:
    with loaded_engine(tiny, known_batching=known, drafts=source) as engine:
        assert engine.facts.draft_tokens == 4
        yield engine


ONCE = pytest.mark.parametrize("known", [Batching.TOGETHER], indirect=True)
"""For tests whose engine decodes rows together, whichever way the answers without drafts came."""


def test_rows_that_accept_different_numbers_answer_as_without_drafts(
    engine: MlxEngine, plain: Answers
) -> None:
    rows = rows_of()
    with guessing(*texts_of(rows, plain)):
        check_same(alone(engine, rows), plain, 0.0)
        for row in rows:
            engine.insert(row)
        together = Counted(engine)
        check_same(together.run(), plain, 0.0)
    assert TOKENS < together.accepted < together.read
    assert set(together.shares) == {0, 1, 2}, "a row with penalties guesses nothing"
    assert all(len(numbers) > 1 for numbers in together.shares.values())
    check_no_row_is_left(engine)


@ONCE
def test_passes_that_are_padded_to_few_shapes_answer_alike(
    tiny: Path, plain: Answers, source: str
) -> None:
    rows = rows_of()
    with loaded_engine(tiny, drafts=source) as engine, guessing(*texts_of(rows, plain)):
        assert engine.batch is not None
        engine.batch.pad()
        run = Counted(engine)
        for row in rows:
            engine.insert(row)
            run.step()
        check_same(run.run(), plain)
    assert run.accepted > TOKENS


def test_rows_join_and_leave_between_guesses(engine: MlxEngine, plain: Answers) -> None:
    rows = rows_of()
    with guessing(*texts_of(rows, plain)), chunks_of(8):
        run = Counted(engine)
        for place, row in enumerate(rows):
            engine.insert(row)
            for _ in range(3 + place):
                run.step()
        engine.remove(rows[1].key)
        run.run()
    left = run.got.pop(1)
    assert left == plain[1][: len(left)]
    check_same(run.got, {key: answer for key, answer in plain.items() if key != 1}, 0.0)


def test_a_row_that_joins_guesses_though_none_has_left(engine: MlxEngine, plain: Answers) -> None:
    first, second = rows_of()[:2]
    # Its prompt is read in one step, however slow the machine is: the first row ends soon.
    with guessing(*texts_of([first, second], plain)), chunks_of(64):
        run = Counted(engine)
        engine.insert(first)
        while not run.got:
            run.step()
        engine.insert(second)
        while 1 not in run.shares:
            run.step()
            assert not any(token.finish for own in run.got.values() for token in own)
        run.run()


def test_a_row_that_is_set_aside_at_any_step_continues(engine: MlxEngine, plain: Answers) -> None:
    rows = rows_of()[:3]
    with guessing(*texts_of(rows, plain)):
        for steps in range(2, 9):
            keep = steps % 2 == 1
            run = Counted(engine)
            for row in rows:
                engine.insert(row)
            for _ in range(steps):
                run.step()
            key = rows[0].key
            if int(key) not in run.got or run.got[int(key)][-1].finish is not None:
                run.run()
                continue
            [left] = engine.set_aside(key, keep=keep)
            assert left.is_kept is keep
            if left.token is not None:
                run.got[int(key)].append(left.token)
            run.step()
            delivered = token_ids(run.got[int(key)])
            engine.insert(make_row(0, rows[0].tokens, TOKENS, top_logprobs=5, delivered=delivered))
            check_same(run.run(), {n: plain[n] for n in range(3)}, 0.0)
    check_no_row_is_left(engine)


@pytest.mark.parametrize("at", range(6))
def test_an_end_among_right_guesses_ends_the_answer_there(
    engine: MlxEngine, plain: Answers, at: int
) -> None:
    row = rows_of()[0]
    text = texts_of([row], plain)[0]
    end = text[len(row.tokens) + at]
    first = text[len(row.tokens) :].index(end)
    changes: dict[str, Any] = {"stop_token_ids": (end,), "top_logprobs": 5}
    with guessing(text):
        stopped = run_rows(engine, [make_row(0, row.tokens, TOKENS, **changes)])[0]
        limited = run_rows(engine, [make_row(0, row.tokens, at + 1, top_logprobs=5)])[0]
    assert token_ids(stopped) == text[len(row.tokens) :][:first]
    assert (stopped[-1].finish, stopped[-1].ended_by) == (FinishReason.STOP, end)
    assert token_ids(limited) == text[len(row.tokens) :][: at + 1]
    assert limited[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba", "qwen3_next"])
def test_what_a_row_leaves_behind_a_block_continues_another(name: str, tmp_path: Path) -> None:
    """Its cache holds what was drawn, and nothing of guesses that were wrong, at its end and at a
    pause."""
    folder, row = make_model(tmp_path / name, name), rows_of()[1]
    with loaded_engine(folder) as engine:
        wanted = run_rows(engine, [row])
        text = texts_of([row], wanted)[0]
        second = make_row(2, [*text, 5, 6], 8, top_logprobs=5)
        wanted |= run_rows(engine, [second])
    changes: dict[str, Any] = {"drafts": "ngram", "prefix_cache_bytes": 1 << 24}
    with loaded_engine(folder, **changes) as engine, guessing(text):
        run = Counted(engine)
        engine.insert(row)
        while not run.accepted:
            run.step()
        [left] = engine.set_aside(row.key, keep=True)
        assert left.token is not None
        run.got[1].append(left.token)
        assert engine.insert(replace(row, delivered=token_ids(run.got[1]))) > len(row.tokens)
        check_same({1: run.run()[1]}, {1: wanted[1]})
        assert engine.insert(second) >= len(text) - 1
        check_same(run_rows(engine), {2: wanted[2]})


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_rows_with_adapters_guess(name: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / name, name)
    adapters = {
        one: str(make_adapter(tmp_path / one, folder, seed=seed))
        for seed, one in enumerate(("one", "two"))
    }
    rows = [
        replace(row, adapter=adapter)
        for row, adapter in zip(rows_of(KINDS[:3]), ("one", "", "two"), strict=True)
    ]
    # Whole prompts in one step, however busy the machine is: other passes round otherwise.
    changes: dict[str, Any] = {"adapters": adapters, "decode_share": 0.0}
    with chunks_of(64), loaded_engine(folder, **changes) as engine:
        wanted = alone(engine, rows)
    with (
        chunks_of(64),
        loaded_engine(folder, drafts="ngram", **changes) as engine,
        guessing(*texts_of(rows, wanted)),
    ):
        check_same(alone(engine, rows), wanted)
        together = Counted(engine)
        for row in rows:
            engine.insert(row)
        # Passes of other sizes round otherwise, and how many rows guess depends on their costs;
        # with a wrong adapter, the tokens differ.
        check_same(together.run(), wanted, BOUND)
    assert (together.most_guessing > 1) is (name not in ALONE)


def test_no_place_behind_the_context_is_read_for_the_guesses_of_another_row(
    tiny: Path, source: str
) -> None:
    rows = [make_row(0, prompt(44), 20, top_logprobs=5), make_row(1, prompt(9), 55, top_logprobs=5)]
    with loaded_engine(tiny, context_length=64) as engine:
        wanted = alone(engine, rows)
    ends: list[int] = []
    with loaded_engine(tiny, context_length=64, drafts=source, draft_tokens=16) as engine:
        assert engine.batch is not None
        mode: Any = engine.batch.mode
        batch, compute = mode.decode.rows, FloatLogits.__call__

        def watched(model: FloatLogits, tokens: Any, *given: Any, **named: Any) -> Any:
            if batch.uids and not mode.waiting:  # no prompt is read any more
                ends.append(max(map(len, batch.tokens)) + tokens.shape[1])
            return compute(model, tokens, *given, **named)

        with (
            guessing(texts_of(rows, wanted)[1], is_same=False),
            mock.patch.object(FloatLogits, "__call__", watched),
        ):
            for row in rows:
                engine.insert(row)
            check_same(Counted(engine).run(), wanted, 0.0)
    assert max(ends) == 64


ALONE = {"gemma3_text", "mamba", "qwen3_next", "falcon_h1"}
"""Types of those below whose rows guess only while they are alone."""

ASKED_OF = {"deepseek_v3", "deepseek_v32", "gpt_bigcode", "llama"} | ALONE
"""Types that are tried with a draft model, too."""

QUICK = {"deepseek_v3", "gemma3_text", "mamba", "falcon_h1"}
"""One for each kind of cache; of llama is the model of all other tests here."""

NAMES = [
    pytest.param(one.name, marks=[] if one.name in QUICK else pytest.mark.slow)
    for one in MODEL_TYPES
    if one.name not in UNLOADABLE
]


@pytest.mark.bits
@pytest.mark.parametrize("name", NAMES)
def test_every_type_answers_and_continues_as_without_drafts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(tmp_path / name, name)
    rows = rows_of(KINDS[:3])
    with loaded_engine(folder) as engine:
        wanted = alone(engine, rows)
        known = {"fingerprint": engine.facts.fingerprint, "batching": engine.facts.batching,
                 "reason": "as before"}  # fmt: skip
    monkeypatch.setattr(draft_model, "_has_same_tokenizer", lambda *given: True)
    tiny = make_tiny_model(tmp_path / "draft") if name in ASKED_OF else None
    bound = 1e-3 if "longcat" in name else 1e-4  # as far as a prompt in pieces is off, too
    for source in ["ngram"] if tiny is None else ["ngram", str(tiny)]:
        changes: dict[str, Any] = {"drafts": source, "known_batching": known}
        texts = texts_of(rows, wanted)
        with guessing(*texts, is_same=False), loaded_engine(folder, **changes) as engine:
            inside: dict[int, list[int]] = {}
            for row in rows:
                engine.insert(row)
                by_itself = Counted(engine)
                check_same(by_itself.run(), {int(row.key): wanted[int(row.key)]}, bound)
                assert 0 < by_itself.accepted < by_itself.read
                inside |= by_itself.inside
            for row in rows:
                engine.insert(row)
            together = Counted(engine)
            check_same(together.run(), wanted, bound)
            for pick in (min, max):  # as if a worker was killed with a part of a pass delivered
                rests = {}
                for row in rows:
                    key, count = int(row.key), pick(inside[int(row.key)])
                    delivered = token_ids(wanted[key])[:count]
                    engine.insert(replace(row, delivered=delivered))
                    rests[key] = wanted[key][count:]
                check_same(Counted(engine).run(), rests, bound)
        if name in ASKED_OF:
            assert (together.most_guessing > 1) is (name not in ALONE)


# ---------------------------------------------------------------- whole requests


@pytest.fixture(scope="module")
def workers(tiny: Path, source: str) -> Iterator[tuple[LoopDriver, LoopDriver]]:
    """One without drafts, and one with them."""
    with (
        loaded_engine(tiny) as engine,
        loaded_engine(tiny, drafts=source) as drafting,
    ):
        both = (LoopDriver(engine, engine.facts), LoopDriver(drafting, drafting.facts))
        yield both
        for driver in both:
            driver.close()


ASKED: dict[str, tuple[bool, dict[str, Any]]] = {
    "greedy": (True, {}),
    "seeded": (True, {"temperature": 1.0, "seed": 11, "logprobs": True, "top_logprobs": 3}),
    "penalties": (False, {"repetition_penalty": 1.3, "temperature": 0.9, "seed": 3}),
    "json": (False, {"response_format": {"type": "json_object"}, "max_tokens": 30}),
}
"""By name: whether the request's rows guess, and what it asks for."""

PROMPT = "Once upon a time there was a fox"


def check_request(
    workers: tuple[LoopDriver, LoopDriver], asked: dict[str, Any], unstopped: Sequence[int] = ()
) -> Answer:
    """Compare a request's answers; return the one with guesses, which go on as `unstopped` does."""
    without, drafting = workers
    whole = without.answer(**asked)
    assert whole.acceptance is not None
    text = [*unpack_tokens(whole.acceptance.prompt_tokens), *(unstopped or whole.tokens)]
    with guessing(text):
        got = drafting.answer(**asked)
    assert (got.tokens, got.text, got.finish) == (whole.tokens, whole.text, whole.finish)
    assert [one.logprobs for one in got.deltas] == [one.logprobs for one in whole.deltas]
    assert got.draft_accepted < len(got.tokens), "the first token of a block is no guess"
    return got


@pytest.mark.bits
@pytest.mark.parametrize("case", ASKED)
def test_a_request_is_answered_as_without_drafts_and_resumed_at_every_token(
    workers: tuple[LoopDriver, LoopDriver], case: str
) -> None:
    guesses, changes = ASKED[case]
    got = check_request(workers, {"prompt": PROMPT, "max_tokens": 16, **changes})
    assert (got.drafted > 0) is guesses
    assert got.acceptance is not None
    with guessing([*unpack_tokens(got.acceptance.prompt_tokens), *got.tokens]):
        check_every_resume(workers[1], got)


def test_requests_that_guess_and_others_are_answered_together_as_alone(
    workers: tuple[LoopDriver, LoopDriver],
) -> None:
    without, drafting = workers
    asked = [
        {"prompt": f"{n} {PROMPT}", "max_tokens": 30, **changes}
        for n, (_, changes) in enumerate(ASKED.values())
    ]
    alone = [without.answer(**one) for one in asked]
    texts = [
        [*unpack_tokens(one.acceptance.prompt_tokens), *one.tokens]
        for one in alone
        if one.acceptance is not None
    ]
    with guessing(*texts):
        together = drafting.finish(*[drafting.dispatch(**one) for one in asked])
    for got, wanted, (guesses, _) in zip(together, alone, ASKED.values(), strict=True):
        assert (got.tokens, got.text, got.finish) == (wanted.tokens, wanted.text, wanted.finish)
        assert (got.drafted > 0) is guesses


def test_a_stop_string_ends_an_answer_among_right_guesses(
    workers: tuple[LoopDriver, LoopDriver], caplog: pytest.LogCaptureFixture
) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 20}
    free = workers[0].answer(**asked)
    text = free.text
    stops = [text[place : place + 2] for place in range(0, len(text) - 2, max(len(text) // 8, 1))]
    answers = [check_request(workers, {**asked, "stop": [stop]}, free.tokens) for stop in stops]
    assert all(one.drafted for one in answers)
    assert "token for a row that is gone" not in caplog.text


# ---------------------------------------------------------------- guesses


def test_a_guess_is_what_followed_the_longest_match() -> None:
    with_8, with_9 = [8, 1, 2, 3, 60, 61, 62], [9, 1, 2, 3, 50, 51, 52]
    for tokens in ([*with_8, *with_9, 9, 1, 2, 3], [*with_9, *with_8, 9, 1, 2, 3]):
        for pending in (0, 1):
            index, known = NgramIndex(), len(tokens) - pending
            assert index.follow(tokens[:known], tokens[known:]) == []
            assert index.length == 4, "9 stands before both"
            assert index.guess(tokens[:known], tokens[known:], 3) == [50, 51, 52]
            assert index.guess(tokens[:known], tokens[known:], 0) == []


def test_what_was_expected_is_compared_with_what_comes() -> None:
    index, tokens = NgramIndex(), [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert index.follow(tokens, []) == []
    assert index.follow([*tokens, 4], []) == [(3, True)]
    assert index.follow([*tokens, 4], [5]) == [(4, True)], "it is pending"
    assert index.guess([*tokens, 4], [5], 2) == [6, 7]
    assert index.follow([*tokens, 4, 5, 6, 7], [1]) == [(5, True), (6, True), (7, False)]
    assert index.guess([*tokens, 4, 5, 6, 7], [1], 2) == [9, 1], "1 may stand for 8"
    assert index.follow([*tokens, 4, 5, 6, 7, 1, 2, 3], [4]) == [(1, False)]
    assert index.length >= GRAM
    assert index.guess([*tokens, 4, 5, 6, 7, 1, 2, 3], [4], 2) == [5, 6]


def test_a_text_goes_on_behind_a_token_that_was_changed() -> None:
    index, tokens = NgramIndex(), [*range(1, 20), 1, 2, 3]
    index.follow(tokens, [])
    assert index.follow([*tokens, 4, 99, 6, 7], []) == [(3, True), (4, False), (1, True), (2, True)]
    assert index.guess([*tokens, 4, 99, 6, 7], [], 2) == [8, 9]
    assert index.follow([*tokens, 4, 99, 6, 7, 98, 97], []) == [(3, False), (1, False)]
    assert not index.place, "two changes, one behind the other: it is another text"


def test_a_longer_match_counts_before_the_text_behind_a_change() -> None:
    index, tokens = NgramIndex(), [1, 2, 3, 4, 5, 6, 7, 0, 4, 99, 6, 60, 61, 0, 1, 2, 3]
    index.follow(tokens, [])
    assert index.follow([*tokens, 4, 99, 6], []) == [(3, True), (4, False), (1, True)]
    assert index.guess([*tokens, 4, 99, 6], [], 2) == [60, 61]


def test_a_guess_goes_on_with_what_repeats() -> None:
    tokens = [1, 2, 3, 1, 2, 3, 1, 2]
    for pending in ([], [3]):
        index = NgramIndex()
        index.follow(tokens, pending)
        assert [*pending, *index.guess(tokens, pending, 7)][:7] == [3, 1, 2, 3, 1, 2, 3]


def test_a_guess_ends_before_a_picture() -> None:
    index, tokens = NgramIndex(), [1, 2, 3, 4, 5, -7, -8, 6, 1, 2, 3]
    index.follow(tokens, [])
    assert index.guess(tokens, [], 4) == [4, 5]


@pytest.mark.parametrize("length", range(GRAM + 1))
def test_a_short_row_has_nothing_to_guess_from(length: int) -> None:
    index = NgramIndex()
    index.follow([7] * length, [])
    assert not index.place


def test_a_long_prompt_is_indexed_in_parts_and_whatever_comes_with_it() -> None:
    index, numbers = NgramIndex(), random.Random(1)
    tokens = [numbers.randrange(1000) for _ in range(3 * INDEXED)]
    tokens += tokens[5:10]
    index.follow(tokens, [])
    assert index.place == 10, "its beginning is read first"
    for _ in range(3):
        index.follow(tokens, [])
    tokens += tokens[3 * INDEXED - 9 : 3 * INDEXED]
    index.follow(tokens, [])
    assert index.guess(tokens, [], 2) == tokens[5:7]


# ---------------------------------------------------------------- the pacer


def paced(plain_s: float, more_s: float, *, share: float, most: int = 4, rows: int = 1) -> Pacer:
    """A pacer that has measured: each place more in a pass takes so much, and this share of the
    tokens expected comes. It has credit for what pays, and not for a try."""
    pacer = Pacer(most, share)
    for _ in range(LEAST_MEASUREMENTS):
        pacer.saw_plain(rows, plain_s)
    for _ in range(LEAST_MEASUREMENTS):
        pacer.saw_block(rows, 3, plain_s + 2 * more_s)
    pacer.credit = LENT / 2
    return pacer


def model_pacer() -> Pacer:
    return Drafts(4, 64).model_pacer


def choose(pacer: Pacer, able: int = 1, rows: int = 1, *, known: bool = True) -> int:
    length = 0 if pacer._learns_alone else GRAM
    return pacer.choose([length] * able, rows, is_pending_known=known)[0]


def test_guesses_pay_while_passes_take_little_for_them() -> None:
    assert choose(paced(1.0, 0.01, share=0.9)) == 4
    assert choose(paced(1.0, 0.01, share=0.3, most=16)) < 8, "late guesses are seldom drawn"
    assert choose(paced(1.0, 0.9, share=0.5)) == 0
    assert choose(paced(1.0, 0.8, share=0.9)) > 0
    assert choose(paced(1.0, 0.8, share=0.9), known=False) == 0, "the pending token may be another"
    assert choose(paced(1.0, 0.2, share=0.9, rows=8), 1, 8) == 0, "one of eight saves too little"
    assert choose(paced(1.0, 0.2, share=0.9, rows=8), 8, 8) == 4


def test_what_is_not_measured_is_measured_first() -> None:
    pacer = Pacer(4, 0.5)
    assert choose(pacer) == 0, "without guesses first"
    for _ in range(LEAST_MEASUREMENTS):
        pacer.saw_plain(1, 1.0)
    assert choose(pacer) == 1
    for _ in range(LEAST_MEASUREMENTS):
        pacer.saw_block(1, 5, 5.0)
    assert choose(pacer) == 0
    assert choose(pacer, 2, 2) == 0, "two rows have not run"


class Played:
    """Steps of one row by a scripted clock: a step without guesses takes one second.

    Attributes:
        now: the seconds that steps have taken.
        lost: of these, what they would not have taken without guesses, less what guesses saved.
        tries: the steps that read guesses.
    """

    def __init__(self, pacer: Pacer, *, more_s: float) -> None:
        self.pacer, self.more_s = pacer, more_s
        self.now = self.lost = 0.0
        self.tries: list[int] = []
        self._steps = 0

    def run(self, steps: int, *, accepted: int) -> None:
        """So many steps, in which so many guesses are drawn at most, and then another token."""
        for _ in range(steps):
            self._steps += 1
            self.pacer.saw_between(0.0)
            count = choose(self.pacer)
            assert self.pacer.predict_s(1) >= 0.0
            took_s, right = 1.0 + self.more_s * count, min(accepted, count)
            if count:
                outcome = Guessed(read=count, accepted=right)
                self.pacer.saw_block(1, 1 + count, took_s, [outcome])
                self.tries.append(self._steps)
            else:
                self.pacer.saw_plain(1, took_s)
            self.now += took_s
            self.lost += took_s - 1.0 - right


@pytest.mark.parametrize("lent", [LENT, MODEL_LENT])
def test_guesses_that_are_never_right_lose_no_more_than_is_lent_and_a_hundredth(
    lent: float,
) -> None:
    """Nothing tells this pacer that its guesses are wrong, so only what they lose can stop them."""
    with mock.patch.object(Pacer, "learn"):
        played = Played(Pacer(1, hope=0.9, lent=lent), more_s=0.5)
        played.run(1000, accepted=0)
        first = played.lost
        played.run(10_000, accepted=0)
    assert lent < first <= lent + SPENT * 1000 + 0.5
    assert SPENT * 9_000 < played.lost - first <= SPENT * 10_000 + 0.5
    late = [b - a for a, b in pairwise(played.tries) if a > 1000]
    assert 49 <= min(late) <= max(late) <= 51, "half a step is lost in fifty"


def test_guesses_that_are_seen_to_be_wrong_are_given_up_before() -> None:
    played = Played(model_pacer(), more_s=0.1)
    played.run(300, accepted=0)
    assert played.lost < 6.0
    played.run(20_000, accepted=0)
    assert 0.003 < played.lost / played.now < 0.015
    before = len(played.tries)
    played.run(1000, accepted=4)
    assert len(played.tries) > before + 100, "what did not pay pays now"
    assert played.lost < 0.0


def test_guesses_that_are_too_dear_are_tried_again_the_more_seldom_the_dearer() -> None:
    tries = []
    for more_s in (0.9, 3.0):
        played = Played(paced(1.0, more_s, share=0.6), more_s=more_s)
        with mock.patch.object(Pacer, "learn"):
            played.run(6000, accepted=0)
        tries.append(len(played.tries))
    assert 55 <= tries[0] <= 68, tries
    assert 15 <= tries[1] <= 21, tries
    hopeless = paced(1.0, 0.9, share=0.2)
    hopeless.credit = LENT
    assert not any(choose(hopeless) for _ in range(1000)), "no price would do"


def test_guesses_may_lose_again_what_they_have_saved_but_tries_may_not() -> None:
    played = Played(Pacer(4, hope=0.9), more_s=0.1)
    played.run(1000, accepted=4)
    assert played.pacer.credit == SAVED
    gained = played.lost
    with mock.patch.object(Pacer, "learn"):
        played.run(100, accepted=0)
    assert SAVED < played.lost - gained <= SAVED + 1.0 + 0.4
    dear = Played(paced(1.0, 0.9, share=0.6), more_s=0.9)
    dear.pacer.credit = SAVED
    with mock.patch.object(Pacer, "learn"):
        dear.run(100, accepted=0)
    assert len(dear.tries) == 2, "the second one a hundred steps for each that the first has lost"


def test_steps_that_were_timed_while_the_machine_was_busy_are_timed_anew() -> None:
    """They took two seconds then, and one now."""
    played = Played(Pacer(1, hope=0.9), more_s=0.75)
    for _ in range(MEASUREMENTS):
        played.pacer.saw_plain(1, 2.0)
    with mock.patch.object(Pacer, "learn"):
        played.run(RENEWED, accepted=0)
        assert len(played.tries) == RENEWED, "they seem to take no longer"
        played.run(100, accepted=0)
        before = played.lost
        played.run(1000, accepted=0)
    assert played.lost - before <= SPENT * 1000 + 0.75


def test_what_guesses_take_grows_with_the_time_of_steps() -> None:
    """As rows get longer, or the machine busier; what they take is not measured anew."""
    pacer = paced(2.0, 1.4, share=0.5)
    assert choose(pacer) == 0
    for _ in range(MEASUREMENTS):
        pacer.saw_plain(1, 10.0)
    assert choose(pacer) == 0
    assert pacer.predict_s(1) == pytest.approx(10.0 + 4 * 7.0)
    for _ in range(MEASUREMENTS):
        pacer.saw_between(2.0)
    assert pacer.predict_s(1) == pytest.approx(10.0 + 4 * 0.7 * 12.0)


def test_shares_are_learned_by_the_length_of_the_match() -> None:
    pacer = Pacer(4)
    for _ in range(50):
        pacer.learn(GRAM, is_right=False)
        pacer.learn(LONGEST_MATCH, is_right=True)
    assert pacer.share(GRAM) < 0.1
    assert pacer.share(LONGEST_MATCH) > 0.9


def test_a_pause_of_the_machine_is_not_the_cost_of_a_guess() -> None:
    pacer = paced(1.0, 0.01, share=0.9)
    pacer.saw_block(1, 5, 60.0, [Guessed(read=4, accepted=1)])
    assert choose(pacer) == 4
    pacer = paced(1.0, 0.9, share=0.5)
    pacer.saw_plain(1, 60.0)
    assert choose(pacer) == 0


def test_a_pause_in_the_first_pass_is_forgotten_soon() -> None:
    pacer = Pacer(4, 0.9)
    for _ in range(LEAST_MEASUREMENTS):
        pacer.saw_plain(1, 1.0)
    pacer.saw_block(1, 2, 60.0)
    assert choose(pacer) == 0
    for _ in range(round((PAUSE - LENT) / SPENT) + 1):
        pacer.saw_between(0.0)
    assert choose(pacer) == 1


@ONCE
@pytest.mark.parametrize("comes", [True, False])
def test_a_row_reads_guesses_only_if_its_expected_tokens_have_come(
    tiny: Path, plain: Answers, comes: bool
) -> None:
    row = rows_of()[0]

    def follow(self: NgramIndex, tokens: Sequence[int], pending: Sequence[int]) -> list[Any]:
        self.place = self.length = GRAM
        return [(GRAM, comes)]

    with (
        loaded_engine(tiny, drafts="ngram") as engine,
        mock.patch.object(NgramIndex, "follow", follow),
    ):
        run = Counted(engine)
        engine.insert(row)
        check_same(run.run(), {0: plain[0]}, 0.0)
    assert bool(run.read) is comes


@ONCE
def test_guesses_begin_behind_a_pending_token_that_is_not_known_yet(
    tiny: Path, plain: Answers
) -> None:
    row = rows_of()[0]
    with (
        loaded_engine(tiny, drafts="ngram") as engine,
        guessing_by_text(texts_of([row], plain), has_errors=False),
        mock.patch.object(Pacer, "choose", return_value=(2, 0.0)),
    ):
        run = Counted(engine)
        engine.insert(row)
        check_same(run.run(), {0: plain[0]}, 0.0)
    assert run.read == run.accepted > 0


# ---------------------------------------------------------------- a draft model


def read_by(model: type[DraftModel] = DraftModel) -> Any:
    """Watch how much of rows draft models read: the shape of each pass."""
    return mock.patch.object(model, "read", autospec=True, side_effect=model.read)


def shapes_of(read: mock.Mock) -> list[tuple[int, ...]]:
    return [mx.array(call.args[1]).shape for call in read.call_args_list]


def test_a_draft_model_begins_near_the_end_of_a_long_prompt_and_reads_it_in_parts(
    tiny: Path,
) -> None:
    rows = [make_row(key, prompt(CONTEXT + 300), 30, top_logprobs=5) for key in range(2)]
    with loaded_engine(tiny) as engine:
        wanted = alone(engine, rows)
    with (
        loaded_engine(tiny, drafts=str(tiny)) as engine,
        guessing(*texts_of(rows, wanted), is_same=False),
        read_by() as read,
    ):
        for row in rows:
            engine.insert(row)
        check_same(Counted(engine).run(), wanted, 0.0)
    shapes = shapes_of(read)
    first = shapes.index((2, 1))  # both guess
    assert all(rows * tokens <= CHUNK for rows, tokens in shapes)
    assert CONTEXT * 2 <= sum(rows * tokens for rows, tokens in shapes[:first]) < CONTEXT * 2 + 200


def test_a_row_that_a_draft_model_has_fallen_behind_of_is_read_on_by_itself(tiny: Path) -> None:
    """Its rows are the text of one answer, so that each begins where the one before has ended."""
    model = DraftModel(folder=mock.Mock(), model=loaded(tiny), width=VOCABULARY_SIZE)
    tokens = prompt(3 * CONTEXT)
    asked = DraftRows(model, VOCABULARY_SIZE, draw_by_share, pads=False)

    def guess(*counts: int) -> dict[int, list[int]]:
        rows = {uid: DraftRow(tokens[:n], tokens[n], PLAIN) for uid, n in enumerate(counts)}
        return asked.guess(rows, 4)

    def afresh(count: int) -> list[int]:
        other = DraftRows(model, VOCABULARY_SIZE, draw_by_share, pads=False)
        rows = {0: DraftRow(tokens[:count], tokens[count], PLAIN)}
        while not (said := other.guess(rows, 4)):
            pass
        return said[0]

    with read_by() as read:
        assert guess(40, 50) == {0: afresh(40), 1: afresh(50)}
        assert guess(43, 52) == {0: afresh(43), 1: afresh(52)}
        assert guess(44, 53 + CHUNK) == {0: afresh(44), 1: afresh(53 + CHUNK)}
        assert guess(45, 44 + 3 * CHUNK) == {0: afresh(45)}, "it is read in two steps"
        assert guess(46, 45 + 3 * CHUNK) == {0: afresh(46), 1: afresh(45 + 3 * CHUNK)}
        asked.keep([1])
        read.reset_mock()
        assert guess(46, 46 + 3 * CHUNK)[1] == afresh(46 + 3 * CHUNK)
        assert guess(46, 50 + 3 * CHUNK + CONTEXT).keys() == {0}
    assert sum(tokens for _, tokens in shapes_of(read)) < 6 * CHUNK
    asked.keep([])
    assert asked.guess({}, 4) == {}


@ONCE
def test_rows_that_leave_keep_no_memory_of_a_draft_model(tiny: Path, plain: Answers) -> None:
    """One of them guesses after a step; of the other one it reads for several steps."""
    rows = [rows_of()[0], make_row(1, prompt(CONTEXT), 30)]
    held = set()
    with (
        loaded_engine(tiny, drafts=str(tiny)) as engine,
        guessing(*texts_of(rows[:1], plain)),
    ):
        assert engine.batch is not None
        for steps in range(2, 9):
            run = Counted(engine)
            for row in rows:
                engine.insert(row)
            for _ in range(steps):
                run.step()
            for row in rows:
                engine.remove(row.key)
            gc.collect()
            engine.batch.wait()  # the pass under way has memory of its own
            held.add(mx.get_active_memory())
    assert len(held) == 1


def loaded(folder: Path) -> Any:
    checked = check_folder(folder, lambda share: None)
    model, _ = load_lazily(checked)
    materialise(model, checked, lambda share: None)
    return model


@ONCE
def test_a_draft_model_whose_pass_fails_is_not_asked_again(
    tiny: Path, plain: Answers, caplog: pytest.LogCaptureFixture
) -> None:
    rows = rows_of()
    failed = 0
    read = DraftModel.read

    def failing(self: DraftModel, *given: Any) -> Any:
        nonlocal failed
        if run.accepted:
            failed += 1
            raise ValueError("[matmul] of other shapes")
        return read(self, *given)

    with (
        loaded_engine(tiny, drafts=str(tiny)) as engine,
        guessing(*texts_of(rows, plain)),
        mock.patch.object(DraftModel, "read", failing),
        mock.patch.object(NgramIndex, "guess", return_value=[]),
    ):
        run = Counted(engine)
        for row in rows:
            engine.insert(row)
        check_same(run.run(), plain, 0.0)
        check_no_row_is_left(engine)
    assert failed == 1
    [said] = [
        one.getMessage() for one in caplog.records if "draft model failed" in one.getMessage()
    ]
    assert "of other shapes" in said


def test_a_draft_model_that_runs_out_of_memory_ends_the_worker(tiny: Path) -> None:
    """What it had taken may be what others need: the load plans with it again."""
    fails = mock.patch.object(
        DraftModel, "read", side_effect=RuntimeError("[malloc] out of memory")
    )
    with loaded_engine(tiny, drafts=str(tiny)) as engine, guessing(), fails:
        engine.insert(rows_of()[0])
        with pytest.raises(MemoryError):
            Counted(engine).run()


def load(folder: Path, drafts: Path) -> None:
    with loaded_engine(folder, drafts=str(drafts)):
        pass


def test_a_draft_model_with_other_tokens_is_refused(tiny: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft")
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer, indent=1))
    load(tiny, draft)  # written otherwise, but the same
    add_tokens(draft, ["<|end|>"], is_special=True)
    with pytest.raises(
        BadLaunchError, match=r"the tokenizer of .*, not .*draft, whose tokens have"
    ):
        load(tiny, draft)


def test_a_draft_model_that_does_not_keep_every_token_is_refused(
    tiny: Path, tmp_path: Path
) -> None:
    draft = make_model(tmp_path / "draft", "mamba")
    shutil.copy(tiny / "tokenizer.json", draft)
    with pytest.raises(BadLaunchError, match="layers all keep every token, not mamba"):
        load(tiny, draft)


def test_a_folder_of_a_draft_model_that_cannot_be_used_is_named(tiny: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    with pytest.raises(ModelMissingError, match=f"^draft model: the model folder {draft} does not"):
        load(tiny, draft)
    make_tiny_model(draft)
    weights = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(BadModelError, match=f"^draft model: {draft}/model.safetensors"):
        load(tiny, draft)


def test_a_draft_model_with_fewer_ids_guesses_for_all(tiny: Path, tmp_path: Path) -> None:
    """Ids that have no text fill up the outputs of some models; parts of pictures are below 0."""
    draft, rows = make_tiny_model(tmp_path / "draft"), rows_of(KINDS[:3])
    weights: Any = mx.load(str(draft / "model.safetensors"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:1000]
    mx.save_safetensors(str(draft / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((draft / "config.json").read_text()) | {"vocab_size": 1000}
    (draft / "config.json").write_text(json.dumps(config))
    with loaded_engine(tiny) as engine:
        wanted = alone(engine, rows)
    with (
        loaded_engine(tiny, drafts=str(draft)) as engine,
        guessing(*texts_of(rows, wanted), is_same=False),
        mock.patch.object(
            BatchSampler, "shape", autospec=True, side_effect=BatchSampler.shape
        ) as shape,
    ):
        for row in rows:
            engine.insert(row)
        check_same(Counted(engine).run(), wanted, 0.0)
    assert {call.args[1].shape[-1] for call in shape.call_args_list} == {VOCABULARY_SIZE}
    model = DraftModel(folder=mock.Mock(), model=loaded(draft), width=1000)
    strange, known = (
        model.read([ids], make_prompt_cache(model.model)) for ids in ([-7, 5, 1800], [0, 5, 999])
    )
    assert mx.array_equal(strange, known)


def test_the_memory_of_a_draft_model_is_planned_and_reported(tiny: Path, tmp_path: Path) -> None:
    draft = make_tiny_model(tmp_path / "draft", config={"num_hidden_layers": 1})
    weights: Any = mx.load(str(draft / "model.safetensors"))
    kept = {name: array for name, array in weights.items() if "layers.1." not in name}
    mx.save_safetensors(str(draft / "model.safetensors"), kept, {"format": "mlx"})
    launch = LaunchSettings(path=str(tiny), drafts=str(draft))
    entry = ModelSettings(name=ModelName("m"), launch=launch)
    need = needs_without_daemon([entry], "cpu", Measurements(tmp_path))[entry.name]
    assert isinstance(need, Need)
    with loaded_engine(tiny, drafts=str(draft)) as engine:
        batch: Any = engine.batch
        both = (engine.model, batch._drafts.model.model)
        held = sum(array.nbytes for one in both for array in iterate_arrays(one))
        assert need.weights.size_bytes == held
        assert [replace(one, row_bytes=0) for one in engine.facts.cache_layers] == [*need.layers]
        assert [one.layers for one in need.layers] == [2, 1]
    engine = MlxEngine(make_spec(tiny, drafts=str(draft), memory_limit_bytes=held - 1))
    with pytest.raises(BadLaunchError, match=r"the weights of .* need"):
        engine.load(lambda phase, progress: None)
    engine.close()


def test_guesses_of_a_draft_model_pay_by_how_many_are_right() -> None:
    played = Played(model_pacer(), more_s=0.1)
    played.run(40, accepted=4)
    assert choose(played.pacer) == 4
    played.run(20, accepted=0)
    assert choose(played.pacer) == 0


def test_what_a_draft_model_reads_counts_as_lost() -> None:
    pacer = paced(1.0, 0.1, share=0.9)
    assert choose(pacer) == 4
    for _ in range(3):
        pacer.lose(1, 6.0)
    assert choose(pacer) == 0


@ONCE
def test_the_text_guesses_before_a_draft_model_is_tried(tiny: Path, plain: Answers) -> None:
    row = rows_of()[0]
    with loaded_engine(tiny, drafts=str(tiny)) as engine:
        batch = engine.batch
        assert batch is not None
        assert batch._drafts is not None
        batch._drafts.pacer = paced(1.0, 0.01, share=0.9)
        untried = batch._drafts.model_pacer = model_pacer()
        for _ in range(LEAST_MEASUREMENTS):
            untried.saw_plain(1, 1.0)
        with (
            guessing_by_text(texts_of([row], plain)),
            mock.patch.object(DraftRows, "guess", return_value={}) as asked,
        ):
            run = Counted(engine)
            engine.insert(row)
            for _ in range(6):
                run.step()
            assert run.read
            assert not asked.called
            check_same(run.run(), {0: plain[0]}, 0.0)
    assert run.accepted > 0


# ---------------------------------------------------------------- what guesses cost


def test_a_row_that_guesses_is_told_to_take_more_places(
    engine: MlxEngine, tiny: Path, source: str
) -> None:
    with loaded_engine(tiny) as without:
        plain = without.facts.cache_layers * (1 if source == "ngram" else 2)
    layers, more = engine.facts.cache_layers, MOST_PADDING + 4
    for rows, longest in ((1, 10), (3, 700)):
        size = cache_bytes(layers, rows=rows, longest=longest)
        assert size == cache_bytes(plain, rows=rows, longest=longest + more)


@contextmanager
def a_second_for_each_place(engine: MlxEngine) -> Iterator[None]:
    """Let only passes take time, and those of a draft model ten seconds."""
    now, batch = 0.0, engine.batch
    compute, read = FloatLogits.__call__, DraftModel.read

    def clock() -> float:
        return now

    def slow(model: FloatLogits, tokens: Any, *given: Any, **named: Any) -> Any:
        nonlocal now
        now += tokens.shape[1]
        return compute(model, tokens, *given, **named)

    def slower(model: DraftModel, *given: Any) -> Any:
        nonlocal now
        now += 10.0
        return read(model, *given)

    assert batch is not None
    assert batch._drafts is not None
    batch.clock = batch.mode.clock = clock
    batch._drafts.pacer, batch._drafts.model_pacer = Pacer(4), model_pacer()
    batch.costs.forget()
    with (
        mock.patch.object(drafts, "time", SimpleNamespace(perf_counter=clock)),
        mock.patch.object(FloatLogits, "__call__", slow),
        mock.patch.object(DraftModel, "read", slower),
        chunks_of(8),
    ):
        yield


def test_the_time_of_prompts_is_no_part_of_a_step_without_guesses(
    tiny: Path, known: dict[str, str]
) -> None:
    with (
        loaded_engine(tiny, known_batching=known, drafts="ngram") as engine,
        a_second_for_each_place(engine),
        mock.patch.object(Pacer, "saw_plain") as saw,
    ):
        engine.insert(make_row(0, prompt(9), 40))
        run = Counted(engine)
        while not run.got:
            run.step()
        engine.insert(make_row(1, prompt(100), 1))
        run.run()
    assert saw.call_count > 20
    assert {call.args for call in saw.call_args_list} == {(1, 1.0)}


def test_the_time_of_guesses_is_no_part_of_other_costs(
    tiny: Path, known: dict[str, str], plain: Answers
) -> None:
    row = rows_of()[0]
    with (
        loaded_engine(tiny, known_batching=known, drafts="ngram") as engine,
        a_second_for_each_place(engine),
    ):
        batch = engine.batch
        assert batch is not None
        with mock.patch.object(Pacer, "choose", return_value=NO_GUESS):
            run_rows(engine, [row])
        assert batch.costs.predict_decode_s(1) == 1.0
        with guessing(*texts_of([row], plain)):
            run = Counted(engine)
            engine.insert(row)
            while not run.read:
                run.step()
            assert batch.predict_step_s() == 1.0 + 1.0 + 4 * 1.0
            engine.insert(make_row(1, prompt(100), 1))
            run.run()
    assert run.accepted > 0
    assert batch.costs.predict_decode_s(1) == 1.0
    assert 0.75 < batch.costs.token_s <= 1.0, "a part of a pass is always the pass's"


def test_what_a_draft_model_reads_of_a_prompt_is_no_part_of_other_costs(tiny: Path) -> None:
    with (
        loaded_engine(tiny, drafts=str(tiny)) as engine,
        a_second_for_each_place(engine),
        mock.patch.object(Pacer, "lose") as lose,
        guessing(is_same=False),
    ):
        run = Counted(engine)
        engine.insert(make_row(0, prompt(3 * CHUNK), 30))
        while not run.got:
            run.step()
        for _ in range(2):
            run.step()
        assert lose.call_args_list == 3 * [mock.call(1, 10.0)], "of three parts"
        assert engine.batch is not None
        assert engine.batch.costs.predict_decode_s(1) == 1.0
        run.run()


# ---------------------------------------------------------------- models that do not guess


def test_a_deterministic_model_does_not_guess(tiny: Path) -> None:
    with loaded_engine(tiny, drafts="ngram", deterministic=True) as engine:
        assert engine.facts.draft_tokens == 0
        assert any("deterministic" in warning for warning in engine.facts.warnings)


def test_off_is_the_default(tiny: Path) -> None:
    with loaded_engine(tiny) as engine:
        assert engine.facts.draft_tokens == 0
        assert not any("drafts" in warning for warning in engine.facts.warnings)
        engine.insert(make_row(1, [1, 2, 3] * 9, 8))
        while engine.row_count():
            assert engine.step().guessed is None


# ---------------------------------------------------------------- a whole daemon


def test_an_answer_with_guesses_outlives_its_worker(tiny: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"prompt_tokens": prompt(12) * 6, "max_tokens": 200}
    foreign = make_tiny_model(tmp_path / "foreign")
    add_tokens(foreign, ["<|end|>"], is_special=True)
    models: dict[str, dict[str, Any]] = {
        "foreign": {"path": str(tiny), "drafts": str(foreign), "preload": False},
        "plain": {"path": str(tiny)},
        "ngram": {"path": str(tiny), "drafts": "ngram", "draft_tokens": 6},
        "model": {"path": str(tiny), "drafts": str(tiny), "draft_tokens": 6},
        "vectors": {"path": str(tiny), "drafts": "ngram", "pooling": "mean"},
    }
    with Daemon(models) as daemon, daemon.client() as client:
        whole = client.complete("plain", **asked)
        assert (whole.usage.drafted, row(client, "plain")["drafts"]) == (0, None)
        for mode, draft_model in (("ngram", None), ("model", str(tiny))):
            got = client.complete(mode, **asked)
            assert got.token_ids == whole.token_ids
            assert 0 <= got.usage.draft_accepted <= got.usage.drafted > 0
            said = row(client, mode)["drafts"]
            assert said == {
                "mode": mode,
                "model": draft_model,
                "tokens": 6,
                "drafted": got.usage.drafted,
                "accepted": got.usage.draft_accepted,
            }
            reader = Reader(client, mode, **asked)
            reader.started()
            os.kill(row(client, mode)["pid"], signal.SIGKILL)
            resumed = reader.finished(600)
            assert resumed.token_ids == whole.token_ids
            assert row(client, mode)["generation"] == 2
        with pytest.raises(RequestError, match="tokens have other ids"):
            client.load("foreign")
        refused = row(client, "foreign")
        assert (refused["state"], refused["last_exit"]["code"]) == ("FAILED", ExitCode.BAD_LAUNCH)
        client.load("vectors")
        assert any("drafts have no effect" in one for one in row(client, "vectors")["warnings"])
