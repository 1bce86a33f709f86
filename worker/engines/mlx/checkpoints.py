"""Decides where a prompt's cache is worth keeping although the row continues; pure.

For models whose caches cannot be cut back, as those of sliding windows and of state-space layers:
what they hold only serves a prompt that continues exactly where it ends, so it must be kept where
other prompts will diverge from this one.

A snapshot every n tokens would take the memory of a row each and miss by up to n; these places are
known beforehand or learned from other prompts.

For a chat the template is asked, on the helper threads: what two chats with the same system prompt
and tools would share with this one, and what the chat's own next turn would. The latter is less
than the whole prompt if a template strips the reasoning of earlier answers, or opens an answer
differently from how it shows it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from .prefix_index import Tokens, as_tokens, shared_length

LEAST_GAIN = 16
"""Of two checkpoints closer than this the first serves for both; the rest is read quickly."""

MAX_CHECKPOINTS = 8
"""The most checkpoints of one prompt: each takes the memory of a row."""


def plan_checkpoints(
    wanted: Iterable[int], *, known: int, shared: int, prompt_tokens: int
) -> tuple[int, ...]:
    """Return the numbers of tokens of a prompt after which its cache is kept, ascending.

    Args:
        wanted: what the text side expects others to share.
        known: how many tokens need not be read.
        shared: how many another prompt has already shared with this one, without a cache that
            would serve: the third such prompt will find one.
        prompt_tokens: without what was delivered; the same prompt again shares all but the last.
    """
    places = sorted({*wanted, shared, prompt_tokens - 1})
    result: list[int] = []
    last = known
    for place in places:
        if place - last >= LEAST_GAIN and place < prompt_tokens:
            result.append(place)
            last = place
    # The last one is for the same prompt again.
    return (*result[: MAX_CHECKPOINTS - 1], *result[MAX_CHECKPOINTS - 1 :][-1:])


BEGINNINGS = ("a", " b", "\nc")
"""Of messages of other users. White space may be one token with the end of what is before it."""

Message = dict[str, Any]
Render = Callable[[list[Message]], str]
Encode = Callable[[str], list[int]]

SYSTEM_ROLES = ("system", "developer")

WHOLE_CHARACTERS = 16 * 1024
"""Up to here a whole prompt is tokenised once more (some ms); of a longer one, what follows the
last special token before the place in question."""


def find_checkpoints(
    messages: Sequence[Message],
    rendered: str,
    tokens: Sequence[int],
    *,
    render: Render,
    encode: Encode,
    special_tokens: Sequence[str] = (),
) -> tuple[int, ...]:
    """Numbers of first tokens that other prompts are likely to share, ascending.

    Args:
        messages: as the template takes them.
        rendered: the prompt.
        tokens: the prompt's tokens.
        render: renders messages as the prompt was rendered; may raise anything.
        encode: tokenises text as the prompt was tokenised.
        special_tokens: whose text begins a piece that is tokenised by itself.
    """
    chat = _Chat(rendered, list(tokens), encode, special_tokens)
    found = {0}
    first = [message for message in messages if message.get("role") in SYSTEM_ROLES]
    others = [_try(render, [*first, _said("user", text)]) for text in BEGINNINGS]
    found.add(min(chat.shared_with(other) if other else 0 for other in others))
    answer = [] if messages[-1].get("role") == "assistant" else [_said("assistant", "x")]
    later = _try(render, [*messages, *answer, _said("user", "y")])
    found.add(chat.shared_with(later) if later else 0)
    return tuple(sorted(count for count in found if 0 < count < len(tokens)))


def _said(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _try(render: Render, messages: list[Message]) -> str | None:
    """Render messages that no client sent; return None if the template refuses them."""
    try:
        return render(messages)
    except Exception:  # noqa: BLE001
        # The template is the model's program. It has accepted the prompt itself; if it does not
        # accept this one as well, that costs a checkpoint, and is nobody's fault.
        return None


class _Chat:
    """A prompt as text and tokens."""

    def __init__(
        self, rendered: str, tokens: list[int], encode: Encode, special_tokens: Sequence[str]
    ) -> None:
        self._rendered = rendered
        self._tokens = as_tokens(tokens)
        self._encode = encode
        self._special_tokens = special_tokens

    def shared_with(self, other: str) -> int:
        """Count the first tokens that are also those of another prompt; 0 if that is not known."""
        if len(other) <= WHOLE_CHARACTERS:
            return shared_length(as_tokens(self._encode(other)), self._tokens)
        place = shared_length(_characters(self._rendered), _characters(other))
        begin = max((self._rendered.rfind(t, 0, place) for t in self._special_tokens), default=-1)
        if begin < 0:
            return 0
        tail = as_tokens(self._encode(self._rendered[begin:]))
        before = len(self._tokens) - len(tail)
        if before < 0 or shared_length(tail, self._tokens[before:]) < len(tail):
            return 0  # this tokenizer does not begin anew there
        other_tail = as_tokens(self._encode(other[begin:]))
        return before + shared_length(other_tail, tail)


def _characters(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.int32)
