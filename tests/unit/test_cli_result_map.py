"""A whole answer as `--json` prints it."""

from __future__ import annotations

import json

from mlxsup.cli.terminal.answer import result_map
from mlxsup.client import FinishReason, Logprobs, Result, TokenLogprob


def test_log_probabilities_of_half_characters_are_json_too() -> None:
    """As `attach` shows those that somebody else has asked for."""
    half = TokenLogprob(token=1, logprob=-0.5, text="\ufffd", raw_bytes=b"\xc3")
    whole = TokenLogprob(token=2, logprob=-1.5, text="a")
    logprobs = [Logprobs(chosen=half, top=[half, whole])]
    result = Result(text="", finish_reason=FinishReason.LENGTH, logprobs=logprobs)
    value = json.loads(json.dumps(result_map("m", "r1", result)))
    [one] = value["logprobs"]
    assert one["chosen"] == {"token": 1, "logprob": -0.5, "text": "\ufffd", "raw_bytes": [0xC3]}
    assert [token["raw_bytes"] for token in one["top"]] == [[0xC3], []]
