"""The child of `bench against`: microseconds that the worker's step loop adds to a step, as JSON.

`python -P bench/loop_steps.py ROWS [ROWS …]`, with `typings` and `tests` of the tree that is to be
measured in PYTHONPATH. The engine computes nothing: what is timed is everything around it, from a
look for messages over text and deltas to the encoded message. Nothing is sent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from mlxsup.protocol.body import RequestBody
from mlxsup.protocol.codec import encode
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.message import Message
from mlxsup.protocol.worker_messages import Dispatch, SetBudget
from mlxsup.worker import loop
from mlxsup.worker.engine import Prompt, RowToken, StepResult
from mlxsup.worker.engines.fake.text import FakeTextCodec
from mlxsup.worker.heartbeat import Board
from mlxsup.worker.link import Link
from mlxsup.worker.text.detokenizer import ByteDetokenizer
from mlxsup.worker.text_threads import TextThreads, Tokenised

from support.worker.turn_bench import FACTS, Around, Engine

BATCHES = 50
STEPS = 20
"""In each batch; the quickest batch counts, because nothing but other work makes one slower."""

WORDS = [b" the", b" of", b" token", b"s", b",", b" gr\xc3\xb6\xc3\x9fer", b" and", b"."]


class Codec(FakeTextCodec):
    """Words like those of a model."""

    def detokenizer(self) -> ByteDetokenizer:  # type: ignore[override]
        return ByteDetokenizer(WORDS)


class Rows(Engine):
    """Gives each row a token, and says which."""

    def __init__(self, keys: Sequence[RequestKey]) -> None:
        super().__init__()
        self.text = Codec()
        self.keys = keys
        self.steps = 0

    def step(self) -> StepResult:
        self.steps += 1
        token = self.steps % len(WORDS)
        return StepResult(tokens=[RowToken(key=key, token=token) for key in self.keys], took_s=0.01)


class Encoding(Around):
    """Encodes what is sent, and forgets it."""

    def send(self, message: Message) -> None:
        self.sent += 1
        encode(message)


def serving(rows: int) -> loop.StepLoop:
    """Return a loop whose rows have their first tokens."""
    keys = [RequestKey(number) for number in range(1, rows + 1)]
    around = Encoding([])
    made = loop.StepLoop(
        engine=Rows(keys), facts=replace(FACTS, context_length=10**7),
        link=cast(Link, around), text=cast(TextThreads, around), board=Board(),
        max_concurrency=rows, step_timeout_s=30.0,
    )  # fmt: skip
    around.inbox += [SetBudget(number=1, rows_bytes=10**15)]
    around.inbox += [Dispatch(key=key, body=b"") for key in keys]
    made.drain()
    body = RequestBody.from_wire({"prompt": "p", "max_tokens": 10**6})
    prompt = Prompt(tokens=[1, 2, 3])
    around.ready += [
        Tokenised(key=key, body=body, prompt=prompt, tokenize_s=0.0) for key in keys
    ]  # fmt: skip
    for _ in range(3):
        assert made.turn()
    return made


def step_us(rows: int) -> float:
    """Microseconds of processor time of one step, without the engine's own."""
    turn = serving(rows).turn
    quickest = float("inf")
    for _ in range(BATCHES):
        begin = time.process_time()
        for _ in range(STEPS):
            turn()
        quickest = min(quickest, time.process_time() - begin)
    return 1e6 * quickest / STEPS


def main() -> None:
    """Prints the file that was measured, and a figure for each number of rows."""
    found = {rows: step_us(int(rows)) for rows in sys.argv[1:]}
    print(json.dumps({"file": loop.__file__, "us": found}))


if __name__ == "__main__":
    main()
