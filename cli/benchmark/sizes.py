"""Which sizes are measured, in which order, and whether they fit the model. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..exit_status import CliError

PROMPT_TOKENS = (16, 512)
OUTPUT_TOKENS = (128,)
CONCURRENCY = (1, 4, 16)
REPEATS = 5

WARM_UP_TOKENS = 16
"""Of the answers before the first repeat: enough to prepare every shape that repeats need."""

LEAST_ID, BEYOND_ID = 100, 250
"""The token ids of prompts. Every vocabulary has them, that of bytes alone too, and the ids below
are those that tokenizers like to use for their marks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One size.

    Attributes:
        prompt_tokens: of each prompt.
        output_tokens: of each answer.
        concurrency: how many requests are sent at once.
    """

    prompt_tokens: int
    output_tokens: int
    concurrency: int

    def __str__(self) -> str:
        """For people: `512 + 128 tokens × 4`."""
        return f"{self.prompt_tokens} + {self.output_tokens} tokens × {self.concurrency}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the command line asks for; None where it leaves the choice.

    Attributes:
        prompt_tokens: sizes of prompts.
        output_tokens: sizes of answers.
        concurrency: numbers of requests at once.
    """

    prompt_tokens: tuple[int, ...] | None = None
    output_tokens: tuple[int, ...] | None = None
    concurrency: tuple[int, ...] | None = None

    def or_else(self, others: Wishes) -> Wishes:
        """These, and the others where these leave the choice."""
        return Wishes(
            prompt_tokens=self.prompt_tokens or others.prompt_tokens,
            output_tokens=self.output_tokens or others.output_tokens,
            concurrency=self.concurrency or others.concurrency,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a model can do.

    Attributes:
        model: its name.
        context_tokens: of a prompt and its answer together; None if nobody knows.
        rows: requests that run at once.
    """

    model: str
    context_tokens: int | None
    rows: int


def cells_of(wishes: Wishes, limits: Limits) -> list[Cell]:
    """The sizes to measure: those that were asked for, and otherwise the usual ones that fit.

    Raises:
        CliError: one that was asked for does not fit, or none of the usual ones does.
    """
    outputs = wishes.output_tokens or OUTPUT_TOKENS
    prompts = wishes.prompt_tokens or _usual_prompts(max(outputs), limits)
    streams = wishes.concurrency or tuple(dict.fromkeys(min(n, limits.rows) for n in CONCURRENCY))
    _check(max(prompts), max(outputs), max(streams), limits)
    return [
        Cell(prompt_tokens=prompt, output_tokens=output, concurrency=number)
        for prompt in prompts
        for output in outputs
        for number in streams
    ]


def left_out(wishes: Wishes, limits: Limits) -> list[str]:
    """Which of the usual sizes are not measured and why, a sentence for each."""
    found = []
    if wishes.concurrency is None and max(CONCURRENCY) > limits.rows:
        found.append(
            f"{limits.model} runs at most {limits.rows} requests at once (max_concurrency), so no"
            f" more were sent; usually {max(CONCURRENCY)} are"
        )
    usual = _usual_prompts(max(wishes.output_tokens or OUTPUT_TOKENS), limits)
    if wishes.prompt_tokens is None and usual != PROMPT_TOKENS:
        found.append(
            f"prompts of {max(PROMPT_TOKENS)} tokens do not fit the context of {limits.model},"
            f" which is {limits.context_tokens} tokens"
        )
    return found


def in_turn(cells: Sequence[Cell], repeat: int) -> list[Cell]:
    """The order of one repeat: every other one runs backwards, so that what changes with time
    changes no size more than another."""
    return list(cells) if repeat % 2 == 0 else list(reversed(cells))


def prompts_of(cell: Cell, chooser: random.Random) -> Iterator[list[int]]:
    """The token ids of prompts that no cache has seen."""
    ids = range(LEAST_ID, BEYOND_ID)
    for _ in range(cell.concurrency):
        yield chooser.choices(ids, k=cell.prompt_tokens)


# ---------------------------------------------------------------- inside


def _usual_prompts(output: int, limits: Limits) -> tuple[int, ...]:
    if limits.context_tokens is None:
        return PROMPT_TOKENS
    fitting = tuple(one for one in PROMPT_TOKENS if one + output <= limits.context_tokens)
    return fitting or (1,)


def _check(prompt: int, output: int, streams: int, limits: Limits) -> None:
    context = limits.context_tokens
    if context is not None and prompt + output > context:
        room = context - output
        hint = f"--prompt-tokens takes at most {room} with answers of {output} tokens"
        if room < 1:
            hint = f"--output-tokens takes at most {context - 1}"
        raise CliError(
            f"a prompt of {prompt} tokens and an answer of {output} are more than the context of"
            f" {limits.model}, which is {context} tokens",
            code="context_length_exceeded",
            hint=hint,
        )
    if streams > limits.rows:
        raise CliError(
            f"{limits.model} runs at most {limits.rows} requests at once, not {streams}: the others"
            " would only wait",
            code="too_many_requests",
            hint=f"--concurrency takes at most {limits.rows}; or raise max_concurrency in the"
            " configuration, then `mlxsup reload`",
        )
