"""The tools that Anthropic's clients run themselves: Anthropic sends their type alone, its models
know the rest, and ours are told it here."""

from __future__ import annotations

from typing import Any


def _schema(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _one_of(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names)}


_LINES = {"type": "array", "items": {"type": "integer"}}
_POINT = {"type": "array", "items": {"type": "integer"}, "description": "x and y in pixels"}

CLIENT_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a bash session that persists between calls.",
        _schema(
            [],
            command=_text("the command; required unless restart is true"),
            restart={"type": "boolean", "description": "true: start a new session"},
        ),
    ),
    "text_editor": (
        "View, create and edit text files. view: path, view_range (first and last line; -1: the"
        " end). create: path, file_text. str_replace: path, old_str (which must occur once),"
        " new_str. insert: path, insert_line (0: before the first), insert_text.",
        _schema(
            ["command", "path"],
            command=_one_of("view", "create", "str_replace", "insert"),
            path=_text("absolute path of the file or folder"),
            view_range=_LINES,
            file_text=_text("content of the new file"),
            old_str=_text("text to replace, exactly as it is in the file"),
            new_str=_text("text that replaces it"),
            insert_line={"type": "integer"},
            insert_text=_text("text to insert after that line"),
        ),
    ),
    "memory": (
        "Keep notes in files under /memories. view: path, view_range. create: path, file_text."
        " str_replace: path, old_str, new_str. insert: path, insert_line, insert_text. delete:"
        " path. rename: old_path, new_path.",
        _schema(
            ["command"],
            command=_one_of("view", "create", "str_replace", "insert", "delete", "rename"),
            path=_text("path under /memories"),
            view_range=_LINES,
            file_text=_text("content of the new file"),
            old_str=_text("text to replace"),
            new_str=_text("text that replaces it"),
            insert_line={"type": "integer"},
            insert_text=_text("text to insert after that line"),
            old_path=_text("path to rename"),
            new_path=_text("its new path"),
        ),
    ),
    "computer": (
        "Use the mouse and the keyboard of a computer, and look at its screen.",
        _schema(
            ["action"],
            action=_one_of(
                "screenshot", "left_click", "right_click", "middle_click", "double_click",
                "triple_click", "mouse_move", "left_click_drag", "left_mouse_down",
                "left_mouse_up", "type", "key", "hold_key", "scroll", "wait", "cursor_position",
            ),
            coordinate=_POINT,
            start_coordinate=_POINT,
            text=_text("what to type, or the keys to press"),
            scroll_direction=_one_of("up", "down", "left", "right"),
            scroll_amount={"type": "integer"},
            duration={"type": "number", "description": "seconds"},
        ),
    ),
}  # fmt: skip
"""Description and schema of each, by the beginning of its type; a date follows it."""
