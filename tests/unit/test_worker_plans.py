"""What a request becomes before it is inserted: its row, its acceptance, its warnings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import pack_tokens
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.worker_messages import Acceptance, Resume
from mlxsup.worker.engine import Prompt, Row
from mlxsup.worker.rows import (
    NO_CALLS_KNOWN,
    NO_FORM,
    NO_ROOM_FOR_CALLS,
    acceptance,
    check_resume,
    plan_row,
    tools_warnings,
)
from mlxsup.worker.text.channels import ChannelRules, Header

from support.planned_rows import FACTS, KEY, RULES, TOOLS, Codec


def plan(tokens: int = 4, delivered: Sequence[int] = (), sampling: Any = None, **body: Any) -> Row:
    asked = RequestBody.from_wire({"prompt": "x", **body})
    prompt = Prompt(tokens=[5] * tokens, checkpoints=(2, 3))
    return plan_row(KEY, asked, prompt, FACTS, delivered=delivered, sampling=sampling)


def test_a_row_has_what_was_asked_for_and_defaults_for_the_rest() -> None:
    plain = plan(seed=3)
    assert plain == Row(key=KEY, tokens=[5] * 4, max_tokens=6, seed=3, checkpoints=(2, 3))
    assert plan(
        delivered=(7, 8),
        sampling={"temperature": 0.5, "top_k": 9},
        seed=3,
        max_tokens=5,
        min_tokens=2,
        top_k=0,
        min_p=0.25,
        stop_token_ids=[9, 4, 9],
        ignore_eos=True,
        logit_bias={"7": 1, 8: -2.5},
        logprobs=True,
    ) == Row(
        key=KEY,
        tokens=[5] * 4,
        max_tokens=5,
        min_tokens=2,
        seed=3,
        delivered=[7, 8],
        stop_token_ids=(4, 9),
        ignore_eos=True,
        logit_bias={7: 1.0, 8: -2.5},
        top_logprobs=0,
        checkpoints=(2, 3),
        sampling=Sampling(temperature=0.5, top_k=0, min_p=0.25),
    )


@pytest.mark.parametrize(
    ("asked", "planned"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_told_of_if_they_were_asked_for(
    asked: dict[str, Any], planned: int | None
) -> None:
    assert plan(**asked).top_logprobs == planned


@pytest.mark.parametrize(
    ("asked", "message", "more"),
    [
        (
            {"tokens": 10},
            "the prompt has 10 tokens; the context of 10 leaves no room for an answer",
            {},
        ),
        (
            {"tokens": 4, "max_tokens": 7},
            "4 prompt tokens and max_tokens 7 exceed the context of 10; at most 6 fit",
            {"max_tokens": 7},
        ),
        (
            {"tokens": 4, "min_tokens": 7},
            "4 prompt tokens and min_tokens 7 exceed the context of 10; at most 6 fit",
            {"min_tokens": 7},
        ),
    ],
)
def test_what_exceeds_the_context_is_refused_with_all_numbers_I6(
    asked: dict[str, Any], message: str, more: dict[str, int]
) -> None:
    with pytest.raises(RemoteError) as caught:
        plan(**asked)
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert caught.value.message == message
    numbers = {"prompt_tokens": asked["tokens"], "context_length": 10}
    assert caught.value.detail == numbers | more


def test_what_does_not_fit_is_capped_if_the_request_says_so() -> None:
    assert plan(4, max_tokens=7, cap_max_tokens=True).max_tokens == 6
    assert plan(4, max_tokens=5, cap_max_tokens=True).max_tokens == 5
    with pytest.raises(RemoteError, match="the prompt has 10 tokens"):
        plan(10, max_tokens=7, cap_max_tokens=True)
    with pytest.raises(RemoteError, match="max_tokens 7 exceed"):
        plan(4, max_tokens=7, cap_max_tokens=False)


def test_what_just_fits_is_planned_I6() -> None:
    assert plan(9).max_tokens == 1
    assert plan(4, max_tokens=6).max_tokens == 6
    assert plan(4, min_tokens=6).min_tokens == 6


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [("stop_token_ids", [299], [1, 300, 2]), ("logit_bias", {"299": 1.0}, {"1": 1.0, "300": 1.0})],
)
def test_ids_outside_the_vocabulary_are_refused_by_name_C7(
    name: str, right: Any, wrong: Any
) -> None:
    plan(**{name: right})
    with pytest.raises(RemoteError) as caught:
        plan(**{name: wrong})
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    expected = "takes ids below this model's vocabulary of 300, not 300"
    assert caught.value.message == f"{name} {expected}"


def test_a_drawn_seed_uses_all_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.randbits", lambda bits: bits)
    assert plan().seed == 63
    assert plan(seed=0).seed == 0


def test_an_acceptance_holds_what_another_life_needs_F10() -> None:
    body = RequestBody(prompt="x", seed=3, stop=["z"])
    prompt = Prompt(tokens=[5, 6], opening="<think>")
    assert acceptance(plan(2, seed=3), body, prompt, FACTS) == Acceptance(
        prompt_tokens=pack_tokens([5] * 2),
        opening="<think>",
        parameters=asdict(Sampling()) | {"stop": ["z"], "max_tokens": 8},
        seed=3,
        fingerprint="f",
    )


def test_an_answer_resumes_in_the_same_model_alone_F10() -> None:
    def resume(fingerprint: str) -> Resume:
        accepted = Acceptance(
            prompt_tokens=b"", opening="", parameters={}, seed=1, fingerprint=fingerprint
        )
        return Resume(acceptance=accepted, delivered=pack_tokens([1, 2, 3]))

    assert check_resume(resume("f"), FACTS) is None
    error = check_resume(resume("g"), FACTS)
    assert error is not None
    assert (error.code, error.detail) == (ErrorCode.WORKER_CRASHED, {"tokens_sent": 3})
    assert error.message == (
        "the model changed while its worker was restarted, so the answer cannot continue"
    )


JSON = {"type": "json_object"}


HEADED = ChannelRules(
    header=Header(end=">", read=lambda header, has_form: None),
    parse_tool_call=RULES.parse_tool_call,
)


@pytest.mark.parametrize(
    ("body", "rules", "warnings"),
    [
        ({}, RULES, ()),
        ({"response_format": JSON}, RULES, ()),
        ({"tools": TOOLS}, RULES, ()),
        ({"tools": TOOLS}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": TOOLS, "tool_choice": "none"}, ChannelRules(), ()),
        ({"tools": TOOLS, "response_format": JSON}, RULES, (NO_ROOM_FOR_CALLS,)),
        ({"tools": TOOLS, "response_format": JSON}, ChannelRules(), (NO_CALLS_KNOWN,)),
        ({"tools": TOOLS, "response_format": {"type": "text"}}, RULES, ()),
        ({"tools": TOOLS, "response_format": JSON}, HEADED, ()),
    ],
)
def test_who_offers_tools_is_warned_if_no_call_can_come(
    body: dict[str, Any], rules: ChannelRules, warnings: tuple[str, ...]
) -> None:
    messages = [{"role": "user", "content": "x"}]
    assert (
        tools_warnings(RequestBody.from_wire({"messages": messages, **body}), Codec(rules))
        == warnings
    )


def test_warnings_are_sentences_of_their_own() -> None:
    assert NO_CALLS_KNOWN == (
        "no format of tool calls is known for this model: a call that it makes is left in the text"
    )
    assert NO_ROOM_FOR_CALLS == (
        "the answer follows its response_format, so it cannot contain a tool call"
    )
    assert NO_FORM == "the answer ended before the part that response_format applies to"
