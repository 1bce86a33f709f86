"""The right answers: computed for the fake engine, learnt from an undisturbed run for MLX."""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from mlxsup.client import AsyncClient
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text

from .asks import Answer, text_of_bytes

SEED = 7
LONG_SHARE = 0.04
"""Of the requests; they are a good part of those that run at any time."""


class Answers(ABC):
    """Prompts, and what each model answers to them."""

    @abstractmethod
    async def learn(self, client: AsyncClient) -> None:
        """Prepares; called once, before anything is disturbed."""

    @abstractmethod
    def draw(self, dice: random.Random, model: str, number: int) -> tuple[str, int, int | None]:
        """A prompt, how many tokens are asked for, and a seed."""

    @abstractmethod
    def answer(self, model: str, prompt: str, max_tokens: int, seed: int | None) -> Answer:
        """The right answer."""


class FakeAnswers(Answers):
    """Each request has its own prompt and its own answer, so any mix-up shows.

    Args:
        short: tokens of most answers, at least and at most.
        long: tokens of the others.
    """

    def __init__(self, short: tuple[int, int], long: int) -> None:
        self._short, self._long = short, long

    async def learn(self, client: AsyncClient) -> None:
        """See `Answers.learn`: nothing has to be learnt."""

    def draw(self, dice: random.Random, model: str, number: int) -> tuple[str, int, int | None]:
        """See `Answers.draw`; some answers end by themselves."""
        count = self._long if dice.random() < LONG_SHARE else dice.randint(*self._short)
        end = f" [[answer {dice.randint(1, count)}]]" if dice.random() < 0.2 else ""
        return f"{model} {number}{end}", count, dice.choice((None, SEED, dice.getrandbits(31)))

    def answer(self, model: str, prompt: str, max_tokens: int, seed: int | None) -> Answer:
        """See `Answers.answer`."""
        ids = encode_text(prompt)
        count, finish = max_tokens, "length"
        if "[[answer " in prompt:
            own = int(prompt.partition("[[answer ")[2].partition("]]")[0])
            count, finish = (own, "stop") if own < count else (count, "length")
        return Answer(
            tokens=answer_tokens(ids, count, seed, voice=model),
            text_of=text_of_bytes,
            finish=finish,
            prompt_tokens=len(ids),
        )


class LearntAnswers(Answers):
    """Answers of real models, asked one at a time before anything is disturbed.

    Args:
        folders: of the models, by name.
        prompts: how many different ones are asked.
        tokens: of each answer.

    Raises:
        AssertionError: two models or prompts have the same answer, which would prove nothing.
    """

    def __init__(self, folders: dict[str, Path], prompts: int, tokens: int) -> None:
        from tokenizers import Tokenizer

        self._prompts, self._tokens = prompts, tokens
        self._tokenizers = {
            name: Tokenizer.from_file(str(folder / "tokenizer.json"))
            for name, folder in folders.items()
        }
        self._learnt: dict[tuple[str, str, int | None], Answer] = {}

    async def learn(self, client: AsyncClient) -> None:
        """See `Answers.learn`."""
        for model, number in itertools.product(self._tokenizers, range(self._prompts)):
            for seed in (None, SEED):
                await self._learn(client, model, f"prompt {number}", seed)
        said = [tuple(answer.tokens) for answer in self._learnt.values()]
        assert len(set(said)) == len(said), "two models, prompts or seeds have the same answer"

    async def _learn(self, client: AsyncClient, model: str, prompt: str, seed: int | None) -> None:
        result = await client.complete(
            model,
            prompt=prompt,
            max_tokens=self._tokens,
            seed=seed,
            temperature=None if seed is None else 0.8,
        )
        tokenizer, whole = self._tokenizers[model], result.text

        def text_of(ids: Sequence[int], is_whole: bool) -> str:
            text: str = tokenizer.decode(list(ids), skip_special_tokens=False)
            return text if is_whole else text.rstrip("\N{REPLACEMENT CHARACTER}")

        assert whole == text_of(result.token_ids, True), "the text is not that of its tokens"
        self._learnt[model, prompt, seed] = Answer(
            tokens=result.token_ids,
            text_of=text_of,
            finish=result.finish_reason.value,
            prompt_tokens=len(tokenizer.encode(prompt).ids),
        )

    def draw(self, dice: random.Random, model: str, number: int) -> tuple[str, int, int | None]:
        """See `Answers.draw`."""
        prompt = f"prompt {dice.randrange(self._prompts)}"
        return prompt, self._tokens, dice.choice((None, SEED))

    def answer(self, model: str, prompt: str, max_tokens: int, seed: int | None) -> Answer:
        """See `Answers.answer`."""
        return self._learnt[model, prompt, seed]
