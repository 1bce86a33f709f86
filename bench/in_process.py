"""The floor: mlx-lm's BatchGenerator driven in this process, with nothing around it.

Run as a child process, it reads one job per line of standard input and answers each with a line:
`{"concurrency": n, "tokens": n}` → `{"seconds": s}`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(folder: str) -> None:
    """Loads the model and serves jobs until standard input ends."""
    start = time.perf_counter()
    import mlx.core as mx
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.utils import load_model, load_tokenizer

    model, _config = load_model(Path(folder))
    tokenizer = load_tokenizer(Path(folder))
    mx.eval(model.parameters())
    stream = mx.new_stream(mx.default_device())
    generator = BatchGenerator(
        model, completion_batch_size=16, prefill_batch_size=16, stream=stream, max_tokens=2
    )
    generator.insert([[5, 6, 7]])
    while any(generator.next()):
        pass
    print(json.dumps({"ready_s": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [
            tokenizer.encode(f"prompt number {n} of the benchmark")
            for n in range(job["concurrency"])
        ]
        detokenizers = {}
        begin = time.perf_counter()
        for uid in generator.insert(prompts, [job["tokens"]] * len(prompts)):
            detokenizers[uid] = tokenizer.detokenizer
        left = len(prompts)
        produced = 0
        while left:
            for response in generator.next()[1]:
                detokenizers[response.uid].add_token(response.token)
                produced += 1
                left -= response.finish_reason is not None
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "tokens": produced}), flush=True)
    generator.close()


if __name__ == "__main__":
    main(sys.argv[1])
