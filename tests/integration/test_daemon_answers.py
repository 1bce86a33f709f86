"""Everything an answer can hold, from the engine through the daemon to the client."""

from __future__ import annotations

import pytest

from mlxsup.client import Channel, FinishReason, RequestError

from support.daemon import Daemon, fake, row
from support.eventually import eventually

CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


def test_reasoning_calls_logprobs_and_warnings_arrive() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        said = f"<think>hm</think>Look <tool_call>{CALL}</tool_call> and <tool_call>oops"
        stream = client.generate(
            "m", prompt=f"[[say {said}]]", seed=4, logprobs=True, top_logprobs=2, top_k=5
        )
        deltas = list(stream)
        result = stream.result
        assert result is not None
        assert result.reasoning == "hm"
        assert result.text == "Look  and <tool_call>oops"
        (call,) = result.tool_calls
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
        assert result.finish_reason is FinishReason.TOOL_CALLS
        assert len(result.warnings) == 1
        assert result.logprobs is not None
        assert [entry.chosen.token for entry in result.logprobs] == result.token_ids
        assert len(result.logprobs[0].top) == 2
        assert {delta.channel for delta in deltas} == set(Channel)
        assert result.usage.completion_tokens == len(result.token_ids)
        plain = client.complete("m", prompt="x", max_tokens=3)
        assert (plain.logprobs, plain.warnings, plain.tool_calls) == (None, [], [])


def test_the_status_tells_of_memory_and_of_the_chunk_of_a_prompt() -> None:
    options = {"active_bytes": 123, "prefill_tokens_per_step": 77}
    model = fake(fake=options, decode_stall_target_ms=90)
    with Daemon({"m": model}) as daemon, daemon.client() as client:
        client.complete("m", prompt="x", max_tokens=3)
        eventually(lambda: row(client, "m")["prefill_chunk"] == 77, timeout_s=60)
        found = row(client, "m")
        assert found["decode_stall_target_ms"] == 90
        assert (found["active_bytes"], found["peak_bytes"]) == (123, 123)


def test_what_only_the_worker_can_refuse_is_refused_by_name_C7() -> None:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        with pytest.raises(RequestError, match="logit_bias takes ids below") as caught:
            client.complete("m", prompt="x", logit_bias={999_999: 1.0})
        assert caught.value.code == "invalid_request"
        assert len(client.complete("m", prompt="x", logit_bias={5: 1.0}, max_tokens=2).text) > 0
