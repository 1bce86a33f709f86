"""LiteLLM over both APIs of the gateway; run by its own interpreter with the gateway's URL."""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

SAY = [{"role": "user", "content": "[[say it works]]"}]
CALL = '[[say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>]]'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def main(url: str) -> None:
    """Asks over each API, whole and streamed, and for a call."""
    litellm: Any = importlib.import_module("litellm")
    for model, base in (("openai/m", f"{url}/v1"), ("anthropic/m", url)):
        asked: dict[str, Any] = {
            "model": model, "api_base": base, "api_key": "none", "max_tokens": 200
        }  # fmt: skip
        answer = litellm.completion(**asked, messages=SAY)
        assert answer.choices[0].message.content == "it works", answer
        pieces = list(litellm.completion(**asked, messages=SAY, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
        assert text == "it works", pieces
        user = [{"role": "user", "content": CALL}]
        answer = litellm.completion(**asked, messages=user, tools=[TOOL])
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather", answer
        assert json.loads(call.function.arguments) == {"city": "Rome"}, answer
    print("it works")


if __name__ == "__main__":
    main(sys.argv[1])
