"""What a person sees of an answer: interrupted, with thoughts before it, with a tool call."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest

from support.cli import ESCAPE, Terminal, command, environment, run_cli
from support.daemon import Daemon, fake, row, wait_for_state

REMARK = "the worker ended; the answer continues when it is back"
PROMPT = "[[fault slow=0.02]] tell"
THOUGHT = "[[say <think>hm</think>well]]"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with Daemon({"m": fake()}) as daemon, daemon.client() as client:
        wait_for_state(client, "m", "READY")
        yield daemon


def generate(daemon: Daemon, prompt: str, *more: str) -> list[str]:
    return ["generate", "m", prompt, "--endpoint", daemon.endpoint, *more]


def kill_worker(daemon: Daemon) -> None:
    with daemon.client() as client:
        os.kill(row(client, "m")["pid"], signal.SIGKILL)


def test_an_interrupted_answer_says_so_in_a_line_and_loses_nothing_F10(daemon: Daemon) -> None:
    whole = run_cli(*generate(daemon, PROMPT, "--max-tokens", "100")).stdout
    with Terminal(*generate(daemon, PROMPT, "--max-tokens", "100")) as terminal:
        terminal.expect(whole[:4])
        kill_worker(daemon)
        terminal.expect(REMARK)
        seen = ESCAPE.sub("", terminal.end())
    before, after = seen.split(f"\n{REMARK}\n")
    # What stood on the terminal was not written over, and nothing comes twice.
    assert before.split("\r")[-1] + after.split("\r")[-1] == whole + "\n"


def test_in_a_pipe_the_answer_is_the_same_and_the_remark_beside_it_F10(daemon: Daemon) -> None:
    arguments = generate(daemon, PROMPT, "--max-tokens", "100")
    whole = run_cli(*arguments).stdout
    with subprocess.Popen(
        command(*arguments),
        bufsize=0,  # `read` takes no more than it gives, and leaves the rest to `communicate`
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    ) as asked:
        assert asked.stdout is not None
        first = asked.stdout.read(1)
        kill_worker(daemon)
        rest, errors = asked.communicate(timeout=60)
    assert (first + rest).decode() == whole
    # A machine that is busy shows the load, too, because that takes more than a second then.
    assert re.sub(r"(?m)^\d\d:\d\d:\d\dZ m: .+\n", "", errors.decode()) == f"{REMARK}\n"


def test_control_characters_of_a_model_steer_no_terminal(daemon: Daemon) -> None:
    said = "[[say a\x1b]0;title\x07b\x08\r\x9bc\td\n]]"
    done = run_cli(*generate(daemon, said, "--max-tokens", "60"))
    assert done.stdout == "a\x1b]0;title\x07b\x08\r\x9bc\td\n", "data is data"
    with Terminal(*generate(daemon, said, "--max-tokens", "60")) as terminal:
        seen = terminal.end().split("\x1b[K")[-1]
    assert seen == "a␛]0;title␇b␈␍\ufffdc\td\n"


def test_thoughts_are_for_a_terminal_and_not_in_what_a_program_reads(daemon: Daemon) -> None:
    done = run_cli(*generate(daemon, THOUGHT, "--max-tokens", "40"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "well", "")
    with Terminal(*generate(daemon, THOUGHT, "--max-tokens", "40")) as terminal:
        seen = terminal.end()
    assert "\x1b[2mm\x1b[0m\nwell" in seen
    assert ESCAPE.sub("", seen).split("\r")[-1].endswith("hm\nwell\n")


def test_what_ends_an_answer_can_be_said(daemon: Daemon) -> None:
    def tokens(prompt: str, *more: str) -> list[int]:
        done = run_cli(*generate(daemon, prompt, "--json", *more))
        assert done.returncode == 0, done.stderr
        ids: list[int] = json.loads(done.stdout)["token_ids"]
        return ids

    short = "[[answer 3]] tell"
    assert len(tokens(short)) == 3
    assert len(tokens(short, "--min-tokens", "5")) == 5
    assert len(tokens(short, "--ignore-eos", "--max-tokens", "9")) == 9
    free = tokens("tell", "--max-tokens", "9")
    ends = ["--stop-token-id", str(free[4]), "--stop-token-id", "1"]
    assert tokens("tell", "--max-tokens", "9", *ends) == free[: free.index(free[4])]
