"""OpenAI's agents with a function; run by their own interpreter with the gateway's URL."""

from __future__ import annotations

import importlib
import sys
from typing import Any

ASKED = '[[say <tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>]]'


def weather(city: str) -> str:
    """The weather of a city; what comes back makes the fake engine end the turn."""
    assert city == "Rome"
    return "[[say it works]]"


def main(url: str) -> None:
    """A turn over chats, and one over responses."""
    agents: Any = importlib.import_module("agents")
    openai: Any = importlib.import_module("openai")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        agent = agents.Agent(
            name="clerk",
            instructions="Be brief.",
            model=kind(model="m", openai_client=client),
            tools=[agents.function_tool(weather)],
        )
        result = agents.Runner.run_sync(agent, ASKED, max_turns=3)
        assert result.final_output == "it works", result
    print("it works")


if __name__ == "__main__":
    main(sys.argv[1])
