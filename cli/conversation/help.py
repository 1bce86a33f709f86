"""What `/help` says, in lines that fit the terminal."""

from __future__ import annotations

from ..terminal.columns import indented, wrapped

COMMANDS = {
    "/system [TEXT]": "show or set the system prompt; - removes it",
    "/set [NAME VALUE]": "show or set how to answer: max-tokens, temperature, top-p, top-k, min-p,"
    " seed, think; - for the default",
    "/model [NAME]": "show or change the model that answers",
    "/retry": "answer the latest turn again",
    "/clear": "forget the conversation",
    "/save [FILE]": "write the conversation to a file",
    "/load FILE": "continue with one that was saved",
    "/exit": "end the chat, as Ctrl-D does",
    "/help, /?": "show this help",
}

REMARKS = (
    "Ctrl-C cancels an answer or clears the line.",
    'A backslash at the end of a line, an open ``` block, or """ until the next """ continues the'
    " turn on the next line.",
)

BESIDE = 20
"""Columns of what is typed, if its meaning stands next to it."""

NARROW = 60
"""With fewer columns than this, the meaning stands below."""


def help_lines(width: int | None) -> list[str]:
    """The lines.

    Args:
        width: columns of the terminal; None for anything else.
    """
    lines = []
    for typed, meaning in COMMANDS.items():
        if width is not None and width < NARROW:
            lines += [typed, *indented(meaning, width)]
        else:
            first, *others = wrapped(meaning, width and width - BESIDE)
            lines.append(f"{typed:{BESIDE}}{first}")
            lines += [" " * BESIDE + other for other in others]
    return [*lines, *(line for remark in REMARKS for line in wrapped(remark, width))]
