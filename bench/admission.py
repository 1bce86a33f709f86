"""Two ways to admit requests to one in-process BatchGenerator: with each step, or batch by batch.

Run as a child process, it reads one job per line of standard input and answers each with a line:
`{"drains": bool, "rows": n, "clients": n, "prompts": [...], "tokens": n}` →
`{"first_token_s": [...]}`. Clients are threads; each asks anew when its answer has ended.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Waiting:
    """One request: asked by a client's thread, served by the main one."""

    prompt: list[int]
    asked_at: float = field(default_factory=time.perf_counter)
    first_at: float = 0.0
    has_ended: threading.Event = field(default_factory=threading.Event)


class Batch:
    """The generator and what waits for it.

    Args:
        generator: mlx-lm's BatchGenerator.
        rows: how many requests may run at once.
        drains: wait until the running batch is empty before anything new is admitted.
        tokens: length of each answer.
    """

    def __init__(self, generator: Any, *, rows: int, drains: bool, tokens: int) -> None:
        self._generator = generator
        self._rows = rows
        self._drains = drains
        self._tokens = tokens
        self._running: dict[int, Waiting] = {}
        self.waiting: queue.SimpleQueue[Waiting] = queue.SimpleQueue()

    def serve(self, requests: int) -> None:
        """Serves that many requests: drain the queue, insert, one step."""
        left = requests
        while left:
            if not self._running:
                self._insert(self.waiting.get())
                self._admit()
            elif not self._drains:
                self._admit()
            for response in self._generator.next()[1]:
                request = self._running[response.uid]
                request.first_at = request.first_at or time.perf_counter()
                if response.finish_reason is not None:
                    del self._running[response.uid]
                    request.has_ended.set()
                    left -= 1

    def _admit(self) -> None:
        while len(self._running) < self._rows:
            try:
                self._insert(self.waiting.get_nowait())
            except queue.Empty:
                return

    def _insert(self, request: Waiting) -> None:
        [uid] = self._generator.insert([request.prompt], [self._tokens])
        self._running[uid] = request


def measure(batch: Batch, prompts: list[list[int]], clients: int) -> list[float]:
    """Times to first token, with that many clients that share the prompts."""
    asked: list[Waiting] = []

    def client(own: list[list[int]]) -> None:
        for prompt in own:
            request = Waiting(prompt)
            asked.append(request)
            batch.waiting.put(request)
            request.has_ended.wait()

    threads = [
        threading.Thread(target=client, args=(prompts[number::clients],))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    batch.serve(len(prompts))
    for thread in threads:
        thread.join()
    return [request.first_at - request.asked_at for request in asked]


def main(folder: str) -> None:
    """Loads the model and serves jobs until standard input ends."""
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model, load_tokenizer

    model, _config = load_model(Path(folder))
    tokenizer = load_tokenizer(Path(folder))
    mx.eval(model.parameters())
    stream = mx.new_stream(mx.default_device())
    for line in sys.stdin:
        job = json.loads(line)
        generator = BatchGenerator(
            model,
            completion_batch_size=job["rows"],
            prefill_batch_size=job["rows"],
            stream=stream,
        )
        batch = Batch(generator, rows=job["rows"], drains=job["drains"], tokens=job["tokens"])
        prompts = [tokenizer.encode(prompt) for prompt in job["prompts"]]
        times = measure(batch, prompts, job["clients"])
        generator.close()
        print(json.dumps({"first_token_s": times}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
