"""Pictures in prompts, with tiny towers of every family that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from mlxsup.protocol.ids import unpack_tokens
from mlxsup.protocol.states import Batching
from mlxsup.worker.engines.mlx import batch as batch_module
from mlxsup.worker.engines.mlx import engine as engine_module

pytest.importorskip("mlx_vlm")

from mlxsup.worker.engines.mlx.drafts import Drafts, NgramIndex, Pacer
from mlxsup.worker.engines.mlx.estimate import estimate
from mlxsup.worker.engines.mlx.prefill import PassCost
from mlxsup.worker.engines.mlx.vision import VisionModel

from support.models.tiny_vision import FAMILIES, asked, make_tiny_vision, picture, plain_answer
from support.worker.loop_driver import Answer, LoopDriver
from support.worker.mlx_rows import driven_engine

pytestmark = [pytest.mark.mlx, pytest.mark.bits]

TOKENS = 24
SYSTEM = {"role": "system", "content": "you are a guide to pictures, and you say what they show"}


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


STORY = "tell me the whole story of the sea, and of the ships and the people on it"
ANSWERED = {"role": "assistant", "content": "a ship on the sea"}
LOOKED = {"role": "tool", "content": asked("it is this one", picture(5))["content"]}

CHATS: tuple[list[dict[str, Any]], ...] = (
    [asked("what is it", picture(1))],
    [asked("what is it", picture(2))],
    [_said("tell me a story of the sea")],
    [SYSTEM, asked("which one is it of these two", picture(1), picture(3, (32, 64)))],
    [_said("hello")],
    [SYSTEM, _said(STORY)],
    [SYSTEM, asked("which one is it of these two", picture(1), picture(4, (32, 64)))],
    [SYSTEM, asked("which one is it of these two", picture(3, (32, 64)), picture(1))],
    [asked("what is it", picture(1)), ANSWERED, _said("and then")],
    [asked("what is it", picture(2)), ANSWERED, _said("and then")],
    [asked("what is it", picture(1)), ANSWERED, asked("and this", picture(2, (64, 32)))],
    [_said("look"), ANSWERED, LOOKED],
    [_said(STORY), ANSWERED, asked(STORY, picture(6, (16, 16), "JPEG"))],
    [asked("three at once", picture(1), picture(1), picture(2))],
    [asked("", picture(7, (64, 64), "WEBP"))],
)
"""Prompts of text, of which one is longer than gemma3's window, and others with pictures: several,
in results and in earlier turns, of all sizes and formats. Some differ in one picture alone, or in
the order of two."""

APART = ((0, 1), (3, 6), (3, 7), (8, 9))
"""The places of those that do."""


KINDS = ("qwen3_5", "gemma3")
"""One that counts positions in three directions and has layers with a state, and one that does
neither, for what no family does otherwise."""

READ_TOGETHER = pytest.mark.parametrize(
    "folder",
    ["qwen3_vl", "mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl"],
    indirect=True,
)
"""Families whose rows read prompts of text together, and whose caches can be cut back."""

ONE_OF_EACH_KIND = pytest.mark.parametrize("folder", KINDS, indirect=True)


# By the same numbers as in KINDS, so that tests of one family share its folder.
@pytest.fixture(scope="module", params=[*KINDS, *(name for name in FAMILIES if name not in KINDS)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision") / request.param, request.param)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[LoopDriver]:
    with driven_engine(folder, rows=len(CHATS), prefix_cache_bytes=None) as driver:
        yield driver


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Answer]:
    """Return each chat's answer by a worker that has read nothing else."""
    with driven_engine(folder, rows=1) as driver:
        return [driver.answer(messages=chat, max_tokens=TOKENS, seed=5) for chat in CHATS]


def test_a_model_with_a_tower_says_that_it_takes_pictures(driver: LoopDriver, folder: Path) -> None:
    facts = driver.facts
    assert facts.takes_pictures
    has_state = folder.name in ("qwen3_5", "qwen3_5_moe")
    assert facts.batching is (Batching.SERIAL_PREFILL if has_state else Batching.TOGETHER)
    assert facts.warnings == ()
    assert facts.versions.keys() == {"mlx", "mlx-lm", "mlx-vlm"}


@ONE_OF_EACH_KIND
def test_the_estimate_is_what_a_worker_takes_with_its_tower(folder: Path) -> None:
    said, before = estimate(folder), mx.get_active_memory()
    with driven_engine(folder, rows=1) as fresh:
        fresh.engine.give_back()
        taken = mx.get_active_memory() - before
        assert said.weight_bytes <= taken < 1.05 * said.weight_bytes
        assert said.layers == fresh.facts.cache_layers


def test_rows_with_pictures_answer_in_company_as_alone(
    driver: LoopDriver, alone: list[Answer]
) -> None:
    asks = [{"messages": chat, "max_tokens": TOKENS, "seed": 5} for chat in CHATS]
    together = driver.finish(*driver.dispatch_together(*asks))
    assert [one.error for one in together] == [None] * len(CHATS)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    for one, other in APART:
        assert alone[one].tokens != alone[other].tokens, "the picture decides"


@READ_TOGETHER
def test_prompts_of_text_share_passes_and_those_with_pictures_do_not(folder: Path) -> None:
    chats = [CHATS[0], CHATS[1], *([_said(f"hello {n}")] for n in range(3))]
    asks = [{"messages": chat, "max_tokens": 2} for chat in chats]
    real = VisionModel.__call__
    with (
        driven_engine(folder, rows=len(chats)) as driver,
        mock.patch.object(VisionModel, "__call__", autospec=True, side_effect=real) as call,
    ):
        driver.finish(*driver.dispatch_together(*asks))
    rows: dict[bool, set[int]] = {True: set(), False: set()}  # by whether there is a picture
    for one in call.call_args_list:
        count, tokens = one.args[1].shape
        if tokens > 1:
            rows["inputs_embeds" in one.kwargs].add(count)
    assert rows == {True: {1}, False: {3}}


@READ_TOGETHER
def test_rows_that_guess_answer_alike_with_pictures_and_without(
    folder: Path, alone: list[Answer]
) -> None:
    def follow(self: NgramIndex, tokens: list[int], pending: list[int]) -> list[Any]:
        self.place = self.length = 3
        return []

    def guess(self: NgramIndex, tokens: list[int], pending: list[int], most: int) -> list[int]:
        """Guess a row's answer, with errors in other places than in those of other rows."""
        for nth, answer in enumerate(alone, 3):
            assert answer.acceptance is not None
            said = [*tokens[len(answer.acceptance.prompt_tokens) // 4 :], *pending]
            if answer.tokens[: len(said)] == said:
                right = answer.tokens[len(said) : len(said) + most]
                return [
                    token ^ (place % (2 * nth) in (0, 1, 3))
                    for place, token in enumerate(right, len(said))
                ]
        return []

    asks = [{"messages": chat, "max_tokens": TOKENS, "seed": 5} for chat in CHATS]
    with (
        mock.patch.object(NgramIndex, "follow", follow),
        mock.patch.object(NgramIndex, "guess", guess),
        mock.patch.object(Pacer, "choose", lambda self, *given, **named: (self.most, 0.0)),
        driven_engine(folder, rows=len(CHATS), drafts="ngram") as driver,
        mock.patch.object(Drafts, "count", autospec=True, side_effect=Drafts.count) as count,
    ):
        got = driver.finish(*driver.dispatch_together(*asks))
    assert [one.tokens for one in got] == [one.tokens for one in alone]
    counts = {(call.args[1], call.args[2].accepted) for call in count.call_args_list}
    assert len({uid for uid, _ in counts}) == len(CHATS)
    assert {accepted for _, accepted in counts} >= {0, 1, 2}


def test_answers_are_those_of_mlx_vlm_that_reads_all_of_it_again_for_each_token(
    folder: Path, alone: list[Answer]
) -> None:
    for chat, answer in zip(CHATS, alone, strict=True):
        assert answer.acceptance is not None
        ids, tokens = plain_answer(folder, chat, 4)
        assert unpack_tokens(answer.acceptance.prompt_tokens) == ids
        assert answer.tokens[:4] == tokens


def test_a_prompt_that_is_read_in_pieces_is_answered_as_whole(
    folder: Path, alone: list[Answer]
) -> None:
    with (
        mock.patch.object(engine_module, "LARGEST_CPU_CHUNK", 7),
        driven_engine(folder, rows=len(CHATS)) as driver,
    ):
        keys = [driver.dispatch(messages=chat, max_tokens=TOKENS, seed=5) for chat in CHATS]
        assert [one.tokens for one in driver.finish(*keys)] == [one.tokens for one in alone]


def test_the_next_turn_reads_what_follows_alone(driver: LoopDriver, folder: Path) -> None:
    first = driver.answer(messages=CHATS[3], max_tokens=TOKENS, seed=5)
    turn = [*CHATS[3], {"role": "assistant", "content": first.text}, _said("and then")]
    other = [SYSTEM, asked("which one is it of these two", picture(1), picture(8, (32, 64)))]
    later = driver.answer(messages=turn, max_tokens=TOKENS, seed=5)
    with driven_engine(folder, rows=1) as fresh:
        assert later.tokens == fresh.answer(messages=turn, max_tokens=TOKENS, seed=5).tokens
        lone = fresh.answer(messages=other, max_tokens=TOKENS, seed=5)
    assert first.acceptance is not None
    length = len(first.acceptance.prompt_tokens) // 4
    assert later.deltas[0].cached_tokens > length - 20, "pictures and all"
    strange = driver.answer(messages=other, max_tokens=TOKENS, seed=5)
    assert strange.tokens == lone.tokens != first.tokens
    assert strange.deltas[0].cached_tokens < later.deltas[0].cached_tokens - 8


@pytest.mark.parametrize("folder", ["qwen3_vl"], indirect=True)
def test_only_the_same_picture_shares_what_one_prompt_has_read_for_another(folder: Path) -> None:
    chats = [[SYSTEM, asked("look", picture(1), picture(3)), _said(tail)] for tail in ("a b", "c")]
    with (
        mock.patch.object(PassCost, "worthwhile", 0),
        mock.patch.object(batch_module, "LEAST_SHARED", 16),
        driven_engine(folder, prefix_cache_bytes=None) as driver,
    ):
        asks = [{"messages": chat, "max_tokens": 1} for chat in chats]
        _, lent = driver.finish(*driver.dispatch_together(*asks))
        assert lent.acceptance is not None
        ids = unpack_tokens(lent.acceptance.prompt_tokens)
        again = driver.answer(messages=chats[1], max_tokens=1)
        raw = driver.answer(prompt_tokens=ids, max_tokens=TOKENS)
    assert lent.deltas[0].cached_tokens > len(ids) // 2, "the first one has read it"
    assert again.deltas[0].cached_tokens == len(ids) - 1
    with driven_engine(folder) as fresh:
        assert raw.tokens == fresh.answer(prompt_tokens=ids, max_tokens=TOKENS).tokens


@ONE_OF_EACH_KIND
def test_what_is_kept_of_a_picture_counts_as_known_prompts_until_it_is_given_back(
    folder: Path,
) -> None:
    with driven_engine(folder, rows=1, prefix_cache_bytes=0) as driver:
        engine = driver.engine
        engine.give_back()
        assert engine.bytes_held().prefix == 0
        held = []
        for chat in (CHATS[0], CHATS[0], CHATS[1]):
            driver.answer(messages=chat, max_tokens=1)
            held.append(engine.bytes_held().prefix)
        assert held == [held[0], held[0], 2 * held[0]]
        assert held[0] > 0
        engine.give_back()
        assert engine.bytes_held().prefix == 0


@pytest.mark.parametrize("folder", ["qwen3_5", "qwen3_vl"], indirect=True)
def test_text_that_begins_as_a_prompt_with_pictures_stands_where_it_did_alone(
    driver: LoopDriver, folder: Path
) -> None:
    driver.answer(messages=CHATS[3], max_tokens=2)
    ask: dict[str, Any] = {"messages": [SYSTEM, _said("a story")], "max_tokens": TOKENS, "seed": 5}
    got = driver.answer(**ask)
    with driven_engine(folder, rows=1) as fresh:
        assert got.tokens == fresh.answer(**ask).tokens


def test_an_answer_about_pictures_continues_after_any_token(
    driver: LoopDriver, folder: Path
) -> None:
    ask: dict[str, Any] = {"messages": CHATS[3], "max_tokens": TOKENS, "seed": 5}
    whole = driver.answer(**ask, temperature=0.7)
    assert whole.acceptance is not None
    assert whole.acceptance.needs_body
    with driven_engine(folder, rows=4) as fresh:
        points = (0, 1, 7, TOKENS - 1)
        keys = [fresh.dispatch(whole.resume_after(point), **ask) for point in points]
        for point, rest in zip(points, fresh.finish(*keys), strict=True):
            assert whole.tokens[:point] + rest.tokens == whole.tokens, point


@ONE_OF_EACH_KIND
def test_an_answer_does_not_continue_over_other_pictures(driver: LoopDriver) -> None:
    whole = driver.answer(messages=CHATS[0], max_tokens=4)
    other = [asked("what is it", picture(1), picture(2))]
    again = driver.answer(whole.resume_after(2), messages=other)
    assert again.error is not None
    assert again.error.code == "worker_crashed"
    assert "pictures" in again.error.message


@ONE_OF_EACH_KIND
@pytest.mark.parametrize("keep", [True, False], ids=["kept", "read again"])
def test_a_paused_answer_about_a_picture_goes_on(driver: LoopDriver, *, keep: bool) -> None:
    ask: dict[str, Any] = {"messages": CHATS[0], "max_tokens": TOKENS, "seed": 5}
    whole = driver.answer(**ask)
    key = driver.dispatch(**ask)
    answer = driver.answers[key]
    while len(answer.tokens) < 5:
        driver.turn()
    driver.pause(key, keep=keep)
    driver.come_back(key, **ask)
    assert driver.finish(key)[0].tokens == whole.tokens
