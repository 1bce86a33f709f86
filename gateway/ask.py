"""What an HTTP request asks of the daemon, whatever API it came through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from mlxsup.protocol.parameters import MAX_SEED, MOST_TOKENS

TEMPLATE = "chat_template_kwargs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request.

    Attributes:
        model: who must answer, as the request calls it.
        target: the same, as the daemon calls it; empty for the same name.
        inputs: one for each prompt: `messages`, `prompt` or `prompt_tokens`, for `generate`.
        n: answers to each.
        parameters: the other arguments of `generate`, which checks them.
        preset: parameters of the model's preset, for what the request leaves out.
        defaults: those of the API, for what the preset leaves out, too.
        template: what the chat template is given unless the preset or the request say otherwise.
        is_streamed: whether the answer comes in pieces.
        has_usage: whether a streamed answer ends with its usage, if the API leaves that open.
        has_echo: whether each answer begins with its prompt.
        has_logprobs: whether each piece of a completion has log-probabilities.
        tells_prompt: whether those of the prompt come in a list of their own.
        is_counted: whether it counts as an answer in `/metrics`; not if nothing is computed for it.
        has_one_call: whether what comes after the first call is left out.
        customs: the names of functions that stand for custom tools.
        picture: the path of one in the message that is to be answered; empty for none.
        names: what the API calls parameters of `generate`, for errors about them.
        unread: the paths of fields that are not known here, or have no effect.
    """

    model: str
    target: str = ""
    inputs: tuple[dict[str, Any], ...]
    n: int = 1
    parameters: dict[str, Any] = field(default_factory=dict)
    preset: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    is_streamed: bool = False
    has_usage: bool = False
    has_echo: bool = False
    has_logprobs: bool = False
    tells_prompt: bool = False
    is_counted: bool = True
    has_one_call: bool = False
    customs: Sequence[str] = ()
    picture: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()

    def in_name_of(self, account: str) -> Self:
        """Return the same on behalf of an account; empty: of the gateway's process."""
        return replace(self, parameters={**self.parameters, "client": account}) if account else self

    def head(self) -> Self:
        """Return the same without what is long: a few KiB, and no parameter but `keep_alive`."""
        kept = {name: self.parameters[name] for name in ("keep_alive",) if name in self.parameters}
        return replace(self, inputs=(), parameters=kept, defaults={}, template={})

    def choices(self) -> list[dict[str, Any]]:
        """Return the arguments of `generate` for each answer, in the order of `choices`.

        OpenAI takes negative seeds, and JavaScript rounds the largest ones up: a seed counts
        modulo the number of those that there are.
        """
        seed = self.parameters.get("seed", self.preset.get("seed"))
        return [
            {
                **self._effective(is_chat="messages" in given),
                **given,
                **({"seed": (seed + nth) & MAX_SEED} if type(seed) is int else {}),
            }
            for given in self.inputs
            for nth in range(self.n)
        ]

    def _effective(self, *, is_chat: bool) -> dict[str, Any]:
        """Return the parameters, with those that the request leaves out.

        Agents send one large `max_tokens` to every model, so what does not fit into the context
        is reduced.
        """
        preset = {name: value for name, value in self.preset.items() if name != TEMPLATE}
        effective = {"cap_max_tokens": True, **self.defaults, **preset, **self.parameters}
        if type(most := effective.get("max_tokens")) is int:
            effective["max_tokens"] = min(most, MOST_TOKENS)
        given = self.parameters.get(TEMPLATE, {})
        if is_chat and isinstance(given, dict):  # otherwise `generate` says what is wrong with it
            extra = {**self.template, **self.preset.get(TEMPLATE, {}), **given}
            if extra:
                effective[TEMPLATE] = extra
        return effective
