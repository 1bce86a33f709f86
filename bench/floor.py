"""The floor: mlx-lm's BatchGenerator in a process of its own, with nothing around it.

The child, `python -m bench.floor MODEL ROWS`, reads one job per line of standard input and answers
each with a line: `{"prompts": [text, …], "sent_s": [seconds, …], "tokens": [n, …]}` → `{"times":
[[seconds, …], …], "prompt_tokens": [n, …]}`, of each token of each prompt, after the job began.
Prompts that are due are inserted together, between two steps. Tokenising counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, cast

from . import ROOT
from support.daemon.child import Child


class Floor:
    """A model in its own process, asked for one job at a time.

    Args:
        model: its folder.
        rows: how many prompts it reads and answers at once.
    """

    def __init__(self, model: Path, rows: int) -> None:
        self._child = Child("-m", "bench.floor", model, rows, cwd=ROOT)
        self._child.line()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._child.kill()
        else:
            self.close()

    def answer(
        self, prompts: Sequence[str], sent_s: Sequence[float], tokens: Sequence[int]
    ) -> tuple[list[list[float]], list[int]]:
        """Return when each token of each answer was there, in seconds, and tokens of each prompt.

        Args:
            prompts: texts.
            sent_s: when each of them is sent, in seconds after the beginning.
            tokens: length of each answer.

        Raises:
            EndedError: the process has failed.
        """
        job = {"prompts": list(prompts), "sent_s": list(sent_s), "tokens": list(tokens)}
        answer = self._child.ask(job)
        return answer["times"], answer["prompt_tokens"]

    @property
    def pid(self) -> int:
        """Of the child process."""
        return self._child.pid

    def close(self) -> None:
        """Ends the child."""
        self._child.end()


def serve(generator: Any, tokenizer: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Answer the prompts of a job as they become due; return what the child says of them."""
    waiting = deque(sorted(range(len(job["sent_s"])), key=job["sent_s"].__getitem__))
    times: list[list[float]] = [[] for _ in waiting]
    prompt_tokens = [0] * len(waiting)
    running: dict[int, tuple[list[float], Any]] = {}
    begin = time.perf_counter()
    while waiting or running:
        now = time.perf_counter() - begin
        due = []
        while waiting and job["sent_s"][waiting[0]] <= now:
            due.append(waiting.popleft())
        if due:
            prompts = [tokenizer.encode(job["prompts"][number]) for number in due]
            uids = generator.insert(prompts, [job["tokens"][number] for number in due])
            for number, uid, prompt in zip(due, uids, prompts, strict=True):
                running[uid] = times[number], tokenizer.detokenizer  # a new one each time
                prompt_tokens[number] = len(prompt)
        elif not running:
            time.sleep(max(0.0, job["sent_s"][waiting[0]] - now))
            continue
        for response in generator.next()[1]:
            own, detokenizer = running[response.uid]
            detokenizer.add_token(response.token)
            assert isinstance(detokenizer.last_segment, str)  # reading it makes the text
            own.append(time.perf_counter() - begin)
            if response.finish_reason is not None:
                del running[response.uid]
    return {"times": times, "prompt_tokens": prompt_tokens}


def main(folder: str, rows: int) -> None:
    """Loads the model and serves jobs until standard input ends."""
    sys.modules.setdefault("torch", cast(ModuleType, None))  # as in a worker
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model, load_tokenizer

    model, _config = load_model(Path(folder))
    tokenizer = load_tokenizer(Path(folder))
    mx.eval(model.parameters())
    generator = BatchGenerator(
        model,
        completion_batch_size=rows,
        prefill_batch_size=rows,
        stream=mx.new_stream(mx.default_device()),
        max_tokens=2,
    )
    generator.insert([[5, 6, 7]])
    while any(generator.next()):
        pass
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(serve(generator, tokenizer, json.loads(line))), flush=True)
    generator.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
