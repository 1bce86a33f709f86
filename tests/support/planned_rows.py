"""A text side with markers, and rows that are planned with it."""

from __future__ import annotations

from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.engine import EngineFacts
from mlxsup.worker.engines.fake.text import FakeTextCodec
from mlxsup.worker.text.channels import NORMAL, REASONING, TOOL, ChannelRules

FACTS = EngineFacts(context_length=10, vocabulary_size=300, fingerprint="f", backend="fake")


KEY = RequestKey(1)


TOOLS = [{"type": "function", "function": {"name": "time"}}]


RULES = ChannelRules(
    transitions={
        NORMAL: [("<r>", REASONING), ("<t>", TOOL)],
        REASONING: [("</r>", NORMAL)],
        TOOL: [("</t>", NORMAL)],
    },
    parse_tool_call=lambda text, tools, is_lenient: [{"name": text, "arguments": {}}],
)


class Codec(FakeTextCodec):
    """The fake engine's text side with other markers."""

    def __init__(self, rules: ChannelRules = RULES) -> None:
        super().__init__()
        self.rules = rules

    @property
    def channel_rules(self) -> ChannelRules:
        return self.rules
