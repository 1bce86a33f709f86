"""How the makers of a model sample, by its generation_config.json."""

from __future__ import annotations

from typing import Any

import pytest

from mlxsup.protocol.parameters import makers_sampling


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0},
         {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0}),
        ({"do_sample": True, "top_k": 64}, {"temperature": 1.0, "top_k": 64}),
        ({"temperature": 0.7}, {"temperature": 0.7}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True, "temperature": 0, "repetition_penalty": 1.05},
         {"temperature": 0, "repetition_penalty": 1.05}),
        ({"do_sample": True, "temperature": "hot", "top_p": 7, "top_k": None, "min_p": -1},
         {"temperature": 1.0}),
        ({"do_sample": True, "temperature": float("nan"), "top_p": True}, {"temperature": 1.0}),
    ],
)  # fmt: skip
def test_makers_sampling_is_read_without_what_no_request_may_have(
    said: dict[str, Any], meant: dict[str, Any]
) -> None:
    assert makers_sampling(said) == meant
