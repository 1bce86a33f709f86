"""README: three commands to an answer, blocks that can be run, and what a newcomer asks."""

from __future__ import annotations

import re

import pytest

from mlxsup.cli.command_table import COMMANDS

from support.readme import README, blocks

TEXT = README.read_text()
FIRST_SCREEN = 40
"""Lines."""

LANGUAGES = {"sh", "python", "toml", "text"}
"""`integration/test_readme_blocks.py` runs the first two and checks the third; text is output."""

QUESTIONS = {
    "What is it?": "**Several MLX models on one machine, one process each.**",
    "Does it run on my computer?": "It runs on Macs with Apple silicon, and on Linux with MLX's",
    "How do I install it?": "pip install '.[cpu,gateway]'",
    "How do I get an answer from a model that I have?": 'mlxsup generate smollm2-135m "What is',
    "Which models does it find?": "`init` looks into the Hugging Face cache and the folders of",
    "I have no model: where do I get one?": "If there is none yet, `mlxsup pull",
    "Can I talk with it?": "mlxsup chat smollm2-135m",
    "What is running, and how do I end it?": "| `mlxsup stop` | returns when every",
    "How do I use it from my program?": "with Client() as client:",
    "Does my program need MLX, too?": "A program in an environment without MLX needs",
    "Can my tool for OpenAI's API use it?": "the daemon serves OpenAI's API at",
    "What can it not do?": "**Not there yet:**",
}
"""What somebody asks who has never seen mlxsup, and how the line begins, or goes, that answers."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_line_answers_a_newcomer(question: str) -> None:
    answer = QUESTIONS[question]
    lines = [number for number, line in enumerate(TEXT.splitlines(), 1) if answer in line]
    assert len(lines) == 1, f"{question} {answer!r} is in the lines {lines}"


def test_ten_questions_are_answered() -> None:
    assert len(QUESTIONS) >= 10


def test_three_commands_lead_to_an_answer_on_the_first_screen() -> None:
    install, use = (block for block in blocks()[:2])
    assert [command.partition(" -")[0].split()[0] for command in install.commands] == ["pip"]
    three, rest = use.commands[:3], use.commands[3:]
    assert [command.split()[:2] for command in three] == [
        ["mlxsup", word] for word in ("init", "start", "generate")
    ]
    assert [command.split()[0] for command in rest] == ["curl"], "the same over HTTP"
    assert use.line + use.text.count("\n") < FIRST_SCREEN


def test_every_block_says_what_it_is() -> None:
    assert len(blocks()) == TEXT.count("\n```") / 2
    assert {block.language for block in blocks()} == LANGUAGES


def test_every_command_that_is_named_exists() -> None:
    named = re.findall(r"(?:`|^)mlxsup ([a-z-]+)", TEXT, re.MULTILINE)
    assert len(named) > 25
    assert {name for name in named if name not in COMMANDS} == set()
