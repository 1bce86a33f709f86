"""Channels through the worker's loop; half a tool call resumes correctly after a crash."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import LaunchSpec
from mlxsup.protocol.states import Channel, FinishReason
from mlxsup.worker.engines.fake.engine import FakeEngine

from support.loop_driver import LoopDriver, check_every_resume

CALL = '{"name": "weather", "arguments": {"city": "Köln 🦊"}}'
SAID = f"<think>hm, \U0001f98a</think>Sure: <tool_call>{CALL}</tool_call> wait"


SPEC = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)


@pytest.fixture(scope="module")
def fake() -> Iterator[LoopDriver]:
    """The fake engine says what the prompt asks for; tests/mlx/test_channels.py has real tokens."""
    engine = FakeEngine(SPEC)
    driver = LoopDriver(engine, engine.load(lambda phase, at: None))
    yield driver
    driver.close()
    engine.close()


def test_the_parts_of_an_answer_have_their_channels(fake: LoopDriver) -> None:
    got = fake.answer(prompt=f"[[say {SAID}]]", seed=3)
    assert got.text_of(Channel.REASONING) == "hm, 🦊"
    assert got.text == "Sure:  wait"
    call = json.loads(got.text_of(Channel.TOOL_CALL))
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln 🦊"}'}
    assert got.finish is FinishReason.TOOL_CALLS


def test_resumed_in_every_half_of_a_call_F10(fake: LoopDriver) -> None:
    whole = fake.answer(prompt=f"[[say {SAID}]]", seed=3)
    check_every_resume(fake, whole)


def test_a_call_cut_off_by_the_budget_is_text_with_a_warning(fake: LoopDriver) -> None:
    got = fake.answer(prompt=f"[[say {SAID}]]", max_tokens=60)
    assert got.finish is FinishReason.LENGTH
    assert "<tool_call>" in got.text
    assert [delta.warning for delta in got.deltas if delta.warning]
    assert sum(bool(delta.tokens) for delta in got.deltas) == 60
    check_every_resume(fake, got)


def test_an_opened_reasoning_begins_with_the_first_token(fake: LoopDriver) -> None:
    got = fake.answer(prompt="[[say so</think>yes]]<think>")
    assert got.acceptance is not None
    assert got.acceptance.opening == "<think>"
    assert (got.text_of(Channel.REASONING), got.text) == ("so", "yes")
    check_every_resume(fake, got)


def test_a_stop_string_ends_reasoning_too(fake: LoopDriver) -> None:
    got = fake.answer(prompt="[[say <think>one two three</think>x]]", stop=["two"])
    assert (got.text_of(Channel.REASONING), got.text) == ("one ", "")
    assert got.finish is FinishReason.STOP
