"""What mlxsup does, shown on a real model in about two minutes: `make demo`.

Starts a daemon of its own (its sockets and logs in a temporary folder, so that it never meets one
that you run), streams from two models at once, kills one worker in mid-answer, and shows that the
other did not notice, and that the first came back by itself and went on where it was.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from mlxsup.client import Client, RequestError

ROOT = Path(__file__).parents[1]
QUESTION = "What is the capital of France?"
STORY = "Tell me a short story about a lighthouse keeper and a storm."
STORY_TOKENS = 40
KILLS = 3


class Answer(threading.Thread):
    """One streamed answer, gathered in a thread of its own."""

    def __init__(self, client: Client, model: str, question: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.model = model
        self.text = ""
        self.tokens = 0
        self.error: RequestError | None = None
        self.resumed = 0
        self._grown = threading.Condition()
        self._stream = client.generate(
            model, messages=[{"role": "user", "content": question}], max_tokens=max_tokens
        )
        self.start()

    def run(self) -> None:
        """Reads the stream to its end."""
        try:
            for delta in self._stream:
                with self._grown:
                    self.text += delta.text
                    self.tokens += len(delta.token_ids)
                    self._grown.notify_all()
            self.resumed = self._stream.result.resumed
        except RequestError as error:
            with self._grown:
                self.error = error
                self._grown.notify_all()

    def wait_for(self, tokens: int) -> None:
        """Returns when there are so many tokens, or an error."""
        with self._grown:
            self._grown.wait_for(lambda: self.tokens >= tokens or self.error is not None)


def say(text: str) -> None:
    """One line of the story."""
    print(text, flush=True)


def step(text: str) -> None:
    """A headline."""
    say(f"\n── {text}")


def write_config(folder: Path) -> Path:
    """config.example.toml, with the model's folder made absolute and its own runtime folder."""
    text = (ROOT / "config.example.toml").read_text()
    text = re.sub(r"^runtime_dir = .*$", f'runtime_dir = "{folder}/run"', text, flags=re.M)
    text = re.sub(r"^log_dir = .*$", f'log_dir = "{folder}/logs"', text, flags=re.M)
    text = text.replace('"models/', f'"{ROOT}/models/')
    config = folder / "config.toml"
    config.write_text(text)
    return config


def mlxsup(*arguments: str) -> list[str]:
    """The command line of this environment's mlxsup."""
    return [sys.executable, "-m", "mlxsup.cli", *arguments]


def stream_from_both(client: Client, names: list[str]) -> None:
    step(f"both models answer at once: {QUESTION}")
    answers = [Answer(client, name, QUESTION, 24) for name in names]
    for answer in answers:
        answer.join()
        if answer.error:
            raise SystemExit(f"{answer.model}: {answer.error}")
        say(f"{answer.model}: {answer.text.strip()}")


def kill_one(client: Client, names: list[str]) -> None:
    victim, other = names
    step(f"{other} alone tells a story, to compare with later")
    alone = Answer(client, other, STORY, STORY_TOKENS)
    alone.join()
    say(f"{other}: {alone.text.strip()}")

    step(f"both tell it; kill -9, {KILLS} times, for the worker of {victim} in mid-answer")
    first, second = (Answer(client, name, STORY, STORY_TOKENS) for name in (victim, other))
    for number in range(1, KILLS + 1):
        first.wait_for(number * STORY_TOKENS // (KILLS + 1))
        before = row(client, victim)
        os.kill(before["pid"], signal.SIGKILL)
        killed_at = time.monotonic()
        say(f"killed pid {before['pid']} after {first.tokens} tokens")
        while row(client, victim)["generation"] == before["generation"]:
            time.sleep(0.05)  # until the next process is spawned
        client.load(victim)
        now = row(client, victim)
        say(f"READY again as pid {now['pid']} after {time.monotonic() - killed_at:.1f} s")
    first.join()
    second.join()
    for answer, name in ((first, victim), (second, other)):
        if answer.error:
            raise SystemExit(f"{name}: {answer.error}")
        same = "the same text as alone" if answer.text == alone.text else "ANOTHER TEXT"
        say(f"{name}: {answer.tokens} tokens, {same}, gone on {answer.resumed} times")
        if answer.text != alone.text:
            raise SystemExit("a crash has changed an answer")


def row(client: Client, model: str) -> dict[str, Any]:
    """The model's row of the status."""
    return next(row for row in client.status()["models"] if row["name"] == model)


def main() -> None:
    """Runs the demonstration and leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="mlxsup-demo-", dir="/tmp") as name:
        folder = Path(name)
        config = write_config(folder)
        step("mlxsup start: one process for each model")
        daemon = subprocess.Popen(mlxsup("start", "--config", str(config)))
        try:
            endpoint = f"ipc://{folder}/run/client.sock"
            wait_for_socket(folder / "run" / "client.sock", daemon)
            with Client(endpoint) as client:
                names = [model["name"] for model in client.status()["models"]]
                for model in names:
                    client.load(model)
                stream_from_both(client, names)
                kill_one(client, names)
            step("mlxsup status")
            subprocess.run(mlxsup("status", "--endpoint", endpoint), check=True)
            step("mlxsup stop")
            subprocess.run(mlxsup("stop", "--endpoint", endpoint), check=True)
            daemon.wait(30)
        finally:
            if daemon.poll() is None:
                daemon.terminate()
                daemon.wait(60)
    say("\nThat was all. Next: README.md")


def wait_for_socket(path: Path, daemon: subprocess.Popen[bytes]) -> None:
    """Returns when the daemon listens; ends the demonstration where it does not come up."""
    deadline = time.monotonic() + 60
    while not path.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the daemon did not start; its message is above")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
