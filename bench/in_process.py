"""The floor: mlx-lm's BatchGenerator driven in this process, with nothing around it.

Run as a child process with a model folder and a number of rows, it reads one job per line of
standard input and answers each with a line: `{"prompts": [text, …], "sent_s": [seconds, …],
"tokens": n}` → `{"times": [[seconds, …], …]}`, of each token of each prompt, after the job began.

A burst is inserted when the last of its prompts has been sent: so it is read as one, which the
arrival of its first prompt alone would prevent. Tokenising counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any, cast


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
