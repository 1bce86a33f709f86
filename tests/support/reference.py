"""What plain mlx-lm answers, in a separate process: the greedy truth that mlxsup is held to."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from pathlib import Path
from mlx_lm.generate import BatchGenerator
from mlx_lm.utils import load_model, load_tokenizer
import mlx.core as mx

folder, prompts, max_tokens = json.loads(sys.stdin.read())
model, _ = load_model(Path(folder))
tokenizer = load_tokenizer(Path(folder))
stop = [[token] for token in tokenizer.eos_token_ids]
generator = BatchGenerator(model, stop_tokens=stop, stream=mx.new_stream(mx.default_device()))
answers = []
for prompt in prompts:
    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    generator.insert([ids], [max_tokens])
    answer, is_done = [], False
    while not is_done:
        for response in generator.next()[1]:
            if response.finish_reason != "stop":
                answer.append(response.token)
            is_done = response.finish_reason is not None
    answers.append(answer)
generator.close()
print(json.dumps(answers))
"""


def greedy_answers(folder: Path, prompts: list[str], max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt's greedy answer, one prompt at a time, by BatchGenerator alone."""
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps([str(folder), prompts, max_tokens]),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return list(json.loads(finished.stdout.splitlines()[-1]))
