"""The batch's books: what it asks of passes and turns, and what it makes of their answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.states import FinishReason
from mlxsup.worker.engine import RowPrefill, RowToken
from mlxsup.worker.engines.mlx import batch as mlx_batch
from mlxsup.worker.engines.mlx.batch import WARMUP_KEY, MlxBatch
from mlxsup.worker.engines.mlx.logprobs import LogprobReader
from mlxsup.worker.engines.mlx.prefix_cache import Found
from mlxsup.worker.engines.mlx.prompt_turns import PromptRead
from mlxsup.worker.text.grammar import Grammar

from support.mlx_rows import make_row

pytestmark = pytest.mark.mlx

STOP = 9


class Passes:
    """Says what the test has put into it.

    Attributes:
        rows: that were inserted.
        removed: uids, and those whose caches were asked for.
        result: of the next step: reads and responses.
        at_checkpoints: what the next step gives to be kept.
        on_step: called in each step.
    """

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.removed: list[tuple[list[int], set[int]]] = []
        self.result: tuple[list[PromptRead], list[Any]] = ([], [])
        self.at_checkpoints: list[tuple[list[Any], list[int]]] = []
        self.on_step: Callable[[], object] = lambda: None
        self.is_closed = False

    def insert(self, row: Any) -> int:
        self.rows.append(row)
        return 10 + len(self.rows)

    def remove(self, uids: Sequence[int], *, kept: Collection[int]) -> dict[int, Any]:
        self.removed.append((list(uids), set(kept)))
        return {uid: ([f"cache {uid}"], [uid]) for uid in kept}

    def drawn(self, uids: Collection[int]) -> dict[int, int]:
        return {}

    def step(self, sizes: Mapping[int, int]) -> tuple[list[PromptRead], list[Any]]:
        self.on_step()
        result, self.result = self.result, ([], [])
        return result

    def take_checkpoints(self) -> list[tuple[list[Any], list[int]]]:
        reached, self.at_checkpoints = self.at_checkpoints, []
        return reached

    def close(self) -> None:
        self.is_closed = True


class Turns:
    """Remembers what it was asked; every prompt that was dropped had been read in part."""

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[int, int, int]] = {}
        self.asked: list[tuple[str, int]] = []
        self.took: list[tuple[int, bool]] = []
        self.passes_s: list[float] = []

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, uid: int, *, total: int, known: int, own: int) -> None:
        self.waiting[uid] = (total, known, own)

    def drop(self, uid: int) -> bool:
        self.waiting.pop(uid, None)
        return True

    def got_token(self, uid: int) -> None:
        self.waiting.pop(uid, None)

    def plan(self, *, decode_rows: int) -> dict[int, int]:
        self.asked.append(("plan", decode_rows))
        return {}

    def hold(self) -> dict[int, int]:
        return {}

    def chunk(self, *, decode_rows: int) -> int:
        self.asked.append(("chunk", decode_rows))
        return 64

    def predict_s(self, *, decode_rows: int) -> float:
        self.asked.append(("predict", decode_rows))
        return 0.25

    def take(
        self, reads: Sequence[PromptRead], *, decode_rows: int, took_s: float
    ) -> list[tuple[int, int, int, int]]:
        self.took.append((decode_rows, 0 <= took_s < 60))
        self.passes_s.append(took_s)
        for read in reads:
            if read.is_over:
                self.waiting.pop(read.uid)
        return [(read.uid, read.done, 50, 7) for read in reads]


class Pacer:
    """Each row takes a second."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def predict_decode_s(self, rows: int) -> float:
        return float(rows)

    def saw_decode(self, *, rows: int, took_s: float) -> None:
        self.seen.append((rows, 0 <= took_s < 60))


class Prefixes:
    """Knows the first three tokens of any longer prompt."""

    def __init__(self) -> None:
        self.kept: list[tuple[list[int], list[Any]]] = []
        self.cleared = 0
        self.on_keep: Callable[[], object] = lambda: None

    def find(self, tokens: Sequence[int]) -> Found:
        return Found(cache=["known"], count=3, shared=3) if len(tokens) > 10 else Found()

    def plan_checkpoints(self, row: Any, found: Found) -> tuple[int, ...]:
        return (5,) if found.count else ()

    def keep(self, tokens: list[int], cache: list[Any]) -> None:
        self.on_keep()
        self.kept.append((tokens, cache))

    def clear(self) -> None:
        self.cleared += 1


class Bench:
    """A batch between its fakes."""

    def __init__(self) -> None:
        self.passes, self.turns, self.pacer = Passes(), Turns(), Pacer()
        self.prefixes = Prefixes()
        self.now_s = 0.0
        parts: Any = (self.passes, self.turns)
        others: Any = {"pacer": self.pacer, "prefixes": self.prefixes, "clock": lambda: self.now_s}
        stream = mx.new_stream(mx.default_device())
        self.batch = MlxBatch(*parts, stream=stream, stop_tokens=[STOP], **others)

    def step(self, *tokens: Any, reads: Sequence[PromptRead] = ()) -> Any:
        self.passes.result = (list(reads), list(tokens))
        return self.batch.step()

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


def response(uid: int, token: int, finish: str | None = None, size: int = 20) -> Any:
    return SimpleNamespace(
        uid=uid, token=token, finish_reason=finish, logprobs=mx.zeros(size),
        prompt_cache=[f"own {uid}"], all_tokens=[uid, token],
    )  # fmt: skip


ONE, TWO, THREE = RequestKey(1), RequestKey(2), RequestKey(3)
ENDED = [([11, STOP], ["own 11"]), ([12, 6], ["own 12"])]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_row_begins_behind_what_is_known_and_what_was_delivered(bench: Bench) -> None:
    tokens = list(range(100, 109))
    row = make_row(1, tokens, max_tokens=8, delivered=[7, 8], stop_token_ids=(4,))
    assert bench.batch.insert(row) == 3
    (new,) = bench.passes.rows
    assert (new.known, new.tokens) == (tokens[:3], [*tokens[3:], 7, 8])
    assert (new.cache, new.checkpoints, new.max_tokens) == (["known"], (5,), 6)
    assert bench.turns.waiting == {11: (11, 3, 0)}
    assert bench.batch.insert(make_row(2, [1, 2])) == 0
    assert (bench.passes.rows[1].known, bench.passes.rows[1].cache) == ([], None)
    with pytest.raises(ValueError, match=r"^request 1 is in the batch already$"):
        bench.batch.insert(row)
    assert (len(bench.passes.rows), bench.batch.row_count()) == (2, 2)


def test_what_the_next_step_takes_follows_from_who_decodes(bench: Bench) -> None:
    """Three rows, one of which is still a prompt; all three may decode within the step."""
    for key in (1, 2, 3):
        bench.batch.insert(make_row(key, [1, 2]))
    bench.step(response(11, 5), response(12, 5))
    bench.turns.asked.clear()
    assert bench.batch.predict_step_s() == 3.25
    assert bench.batch.prefill_chunk() == 64
    bench.step()
    assert bench.turns.asked == [("predict", 2), ("chunk", 2), ("plan", 2)]
    assert bench.turns.took == [(0, True), (2, True)]
    assert bench.pacer.seen == [], "prompts were read as well: that says nothing of decode alone"
    bench.step(response(13, 5))
    bench.step()
    assert bench.pacer.seen == [(3, True)]
    bench.batch.remove(ONE, TWO, THREE)
    bench.step()
    assert bench.pacer.seen == [(3, True)]


def test_reads_and_tokens_are_told_by_the_requests_keys(bench: Bench) -> None:
    bench.batch.insert(make_row(1, [1, 2]))
    bench.batch.insert(make_row(2, [1, 2]))
    result = bench.step(
        response(11, 5), reads=[PromptRead(uid=12, done=30, is_over=False, took_s=0.1)]
    )
    assert result.tokens == [RowToken(key=ONE, token=5)]
    assert result.prefill == [RowPrefill(key=TWO, done=30, total=50, computed=7)]
    assert bench.turns.waiting == {12: (2, 0, 0)}


@pytest.mark.parametrize(("passes_s", "decode_s"), [(2.5, 1.0), (0.5, 0.5)])
def test_a_step_says_how_long_it_took_and_what_of_that_was_decode(
    bench: Bench, passes_s: float, decode_s: float
) -> None:
    """What is predicted, at most all of it; work of the passes alone teaches the pacers."""
    for key in (1, 2):
        bench.batch.insert(make_row(key, [1, 2]))
    bench.passes.on_step = lambda: bench.spend(passes_s)
    bench.prefixes.on_keep = lambda: bench.spend(0.25)
    bench.passes.at_checkpoints = [(["cache"], [1, 2])]
    reading = PromptRead(uid=12, done=30, is_over=False)
    first = bench.step(response(11, 5), reads=[reading])
    assert (first.took_s, first.decode_s) == (passes_s + 0.25, 0.0), "no row had decoded yet"
    second = bench.step(response(11, 5), reads=[reading])
    assert (second.took_s, second.decode_s) == (passes_s, decode_s)
    assert bench.turns.passes_s == [passes_s, passes_s]
    assert bench.batch.step().decode_s == decode_s, "the row decodes, whether a token came or not"


def test_a_row_that_ends_by_itself_is_kept_and_forgotten(bench: Bench) -> None:
    for key in (1, 2):
        bench.batch.insert(make_row(key, [1, 2], top_logprobs=0))
    result = bench.step(response(11, STOP, "stop"), response(12, 6, "length"))
    stopped, cut = result.tokens
    assert (stopped.key, stopped.token, stopped.finish) == (ONE, None, FinishReason.STOP)
    assert stopped.logprobs is None
    assert (cut.key, cut.token, cut.finish) == (TWO, 6, FinishReason.LENGTH)
    assert cut.logprobs is not None
    assert not bench.batch.has_rows()
    assert bench.prefixes.kept == [], "their last tokens do not wait for that"
    bench.batch.settle()
    assert bench.prefixes.kept == ENDED
    bench.batch.settle()
    assert bench.prefixes.kept == ENDED
    assert bench.passes.removed == [], "mlx-lm has removed them"
    assert set(bench.batch.books()) == {0}
    bench.batch.insert(make_row(1, [1, 2]))
    assert bench.batch.row_count() == 1


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda batch: batch.insert(make_row(3, [1, 2])), id="insert"),
        pytest.param(MlxBatch.step, id="step"),
        pytest.param(MlxBatch.decode, id="decode"),
        pytest.param(MlxBatch.give_back, id="give_back"),
    ],
)
def test_what_ended_rows_have_read_is_kept_before_anything_else_happens(
    bench: Bench, call: Callable[[MlxBatch], object]
) -> None:
    """A row that joins may begin behind it, and who asks for memory gets what it took."""
    for key in (1, 2):
        bench.batch.insert(make_row(key, [1, 2]))
    bench.step(response(11, STOP, "stop"), response(12, 6, "length"))
    bench.passes.result = ([], [])
    call(bench.batch)
    assert bench.prefixes.kept == ENDED


def test_removed_rows_leave_in_one_change_and_are_kept(bench: Bench) -> None:
    for key in (1, 2, 3):
        bench.batch.insert(make_row(key, [1, 2], top_logprobs=1))
    bench.batch.remove(RequestKey(77), THREE, ONE, RequestKey(78))
    assert bench.passes.removed == [([13, 11], {11, 13})]
    assert sorted(tokens for tokens, _ in bench.prefixes.kept) == [[11], [13]]
    assert bench.batch.row_count() == 1
    bench.batch.remove(RequestKey(77))
    assert len(bench.passes.removed) == 1
    assert bench.step(response(12, 5)).tokens[0].logprobs is not None


def test_what_ends_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up ends by its length alone."""
    monkeypatch.setattr(mlx_batch, "StopSequences", list)
    bench.batch.insert(make_row(-1, [1, 2], stop_token_ids=(4,)))
    bench.batch.insert(make_row(1, [1, 2], stop_token_ids=(4,)))
    bench.batch.insert(make_row(2, [1, 2], stop_token_ids=(4,), ignore_eos=True))
    assert [row.stops for row in bench.passes.rows] == [[], [(STOP,), (4,)], [(4,)]]


def test_the_warm_up_leaves_nothing(bench: Bench) -> None:
    bench.batch.insert(make_row(-1, [1, 2]))
    bench.step(response(11, 5, "length"))
    bench.batch.insert(make_row(-1, [1, 2]))
    bench.batch.remove(WARMUP_KEY)
    assert bench.passes.removed == [([12], set())]
    assert bench.prefixes.kept == []


def test_nothing_is_read_for_rows_that_have_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither their log-probabilities nor what their grammars would need to know."""
    asked: list[str] = []

    def read(*_: object) -> dict[int, object]:
        asked.append("logprobs")
        return {}

    def drawn(uids: Collection[int]) -> dict[int, int]:
        asked.append("drawn")
        return {}

    monkeypatch.setattr(LogprobReader, "read", read)
    monkeypatch.setattr(bench.passes, "drawn", drawn)
    grammar = Grammar(SimpleNamespace(is_stopped=lambda: False), [STOP])
    for key in (1, 2):
        bench.batch.insert(make_row(key, [1, 2], top_logprobs=1, grammar=grammar))
    bench.batch.insert(make_row(3, [1, 2]))
    bench.batch.remove(ONE)
    bench.step(response(12, 5, "length"), response(13, 5))
    assert asked == ["drawn", "logprobs"]
    bench.step(response(13, 5))
    assert asked == ["drawn", "logprobs"]


def test_caches_at_checkpoints_are_kept(bench: Bench) -> None:
    bench.batch.insert(make_row(1, [1, 2]))
    bench.passes.at_checkpoints = [(["half"], [1])]
    bench.step()
    assert bench.prefixes.kept == [([1], ["half"])]


def test_the_first_token_shows_the_width_of_the_output_and_whether_it_has_numbers(
    bench: Bench,
) -> None:
    bench.batch.insert(make_row(1, [1, 2]))
    bench.step()
    assert (bench.batch.logits_width, bench.batch.gives_numbers) == (None, True)
    first = response(11, 5)
    first.logprobs = mx.array([0.0, -mx.inf, mx.nan])
    bench.step(first)
    assert (bench.batch.logits_width, bench.batch.gives_numbers) == (3, False)
    bench.step(response(11, 5, size=7))
    assert (bench.batch.logits_width, bench.batch.gives_numbers) == (3, False)
    other = Bench()
    other.batch.insert(make_row(1, [1, 2]))
    never = response(11, 5)
    never.logprobs = mx.array([0.0, -mx.inf])
    other.step(never)
    assert other.batch.gives_numbers


def test_a_closed_batch_has_removed_its_rows_before_its_passes_end(bench: Bench) -> None:
    for key in (1, 2):
        bench.batch.insert(make_row(key, [1, 2]))
    bench.batch.close()
    assert bench.passes.removed == [([11, 12], {11, 12})]
    assert (bench.passes.is_closed, bench.prefixes.cleared) == (True, 1)
    assert not bench.batch.has_rows()


def test_what_is_kept_for_speed_is_given_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream is waited for first: a pass under way would give its memory back too late; and
    again afterwards: only then does CUDA's pool let others have it."""
    order: list[str] = []
    monkeypatch.setattr(mx, "synchronize", lambda stream: order.append("wait"))
    monkeypatch.setattr(mx, "clear_cache", lambda: order.append("clear"))
    bench.batch.give_back()
    assert (bench.prefixes.cleared, order) == (1, ["wait", "clear", "wait"])
