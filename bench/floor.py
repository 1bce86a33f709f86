"""The floor: mlx-lm's BatchGenerator in a process of its own, with nothing around it.

The child, `python -m bench.floor MODEL ROWS`, reads one job per line of standard input and answers
each with a line: `{"prompts": [text, …], "sent_s": [seconds, …], "tokens": n}` → `{"times":
[[seconds, …], …]}`, of each token of each prompt, after the job began. A burst is inserted when the
last of its prompts has been sent, so that it is read as one. Tokenising counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, Self, cast

from support.daemon.child import Child

ROWS = 16


class Floor:
    """A model in its own process, asked for one burst at a time.

    Attributes:
        ready_s: from the beginning of its imports until it had answered something.
        started_s: the same from outside: the start of the interpreter counts, too.

    Args:
        model: its folder.
        rows: how many prompts it reads and answers at once.
    """

    def __init__(self, model: Path, rows: int = ROWS) -> None:
        begin = time.perf_counter()
        self._child = Child("-m", "bench.floor", model, rows)
        self.ready_s = float(self._child.line()["ready_s"])
        self.started_s = time.perf_counter() - begin

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

    def burst(
        self, prompts: Sequence[str], sent_s: Sequence[float], tokens: int
    ) -> list[list[float]]:
        """When each token of each answer was there, in seconds after the first prompt was sent.

        Args:
            prompts: texts.
            sent_s: when each of them is sent, in seconds.
            tokens: length of each answer.
        """
        job = {"prompts": list(prompts), "sent_s": list(sent_s), "tokens": tokens}
        times: list[list[float]] = self._child.ask(job)["times"]
        assert [len(own) for own in times] == [tokens] * len(prompts), "an answer ended early"
        return times

    def close(self) -> None:
        """Ends the child."""
        self._child.end()


def burst(generator: Any, tokenizer: Any, job: dict[str, Any]) -> list[list[float]]:
    """Answers all prompts of a job; when each token was there."""
    begin = time.perf_counter()
    last_sent_s = max(job["sent_s"])
    while time.perf_counter() - begin < last_sent_s:
        pass  # a thousandth of a second, less than a sleep would overshoot
    prompts = [tokenizer.encode(prompt) for prompt in job["prompts"]]
    uids = generator.insert(prompts, [job["tokens"]] * len(prompts))
    times: dict[int, list[float]] = {uid: [] for uid in uids}
    detokenizers = {}
    for uid in uids:
        detokenizers[uid] = tokenizer.detokenizer  # a new one each time
    left = len(uids)
    while left:
        for response in generator.next()[1]:
            detokenizer = detokenizers[response.uid]
            detokenizer.add_token(response.token)
            assert isinstance(detokenizer.last_segment, str)  # reading it makes the text
            times[response.uid].append(time.perf_counter() - begin)
            left -= response.finish_reason is not None
    return [times[uid] for uid in uids]


def main(folder: str, rows: int) -> None:
    """Loads the model and serves jobs until standard input ends."""
    start = time.perf_counter()
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
    print(json.dumps({"ready_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"times": burst(generator, tokenizer, json.loads(line))}), flush=True)
    generator.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
