"""Checks README and the documents against the code: `python tools/check_docs.py`.

Links lead somewhere, commands and their options exist, so do make's targets and the files that are
named, every state, error code, command and key is described somewhere, and the example
configuration and the schema are those of the code. Prints a line for each problem, and exits with 1
if there is one.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from mlxsup.cli.command_table import ALIASES, COMMANDS, GROUPS, HABITS, HELP_ALIAS
from mlxsup.cli.main import root
from mlxsup.protocol.errors import ErrorCode
from mlxsup.protocol.states import State
from mlxsup.supervisor.config.tables import SECTIONS
from mlxsup.supervisor.core.transitions import LEAVES_TO
from tools import reference

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FOLDERS_OF_OTHERS = {".venv", ".git", "build", "dist", "models", "node_modules"}
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
SHELLS = ("", "sh", "shell", "bash", "console")


# ---------------------------------------------------------------- links and files


def anchors(document: Path) -> set[str]:
    """Return the names that a link may have behind `#`."""
    text = FENCE.sub("", document.read_text())
    named = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]*>", "", title))
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        number = sum(name == slug or name.startswith(f"{slug}~") for name in named)
        named.add(f"{slug}~{number}" if number else slug)
    return {name.replace("~", "-") for name in named}


def broken_links(document: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name).resolve() if name else document
        if not file.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            yield f"{file.name} has no heading for {target}"


@cache
def files() -> list[str]:
    """Return the path of every file of the project."""
    found: list[str] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [one for one in folders if one not in FOLDERS_OF_OTHERS]
        found += [f"{folder}/{name}" for name in names]
    return found


def missing_files(text: str) -> Iterator[str]:
    for name in SPAN.findall(text):
        if re.fullmatch(r"[\w./-]+\.py", name) and not any(
            file.endswith(f"/{name.removeprefix('/')}") for file in files()
        ):
            yield f"there is no file {name}"


# ---------------------------------------------------------------- commands and targets


def code(text: str) -> Iterator[str]:
    """Lines of shell blocks, and inline code."""
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            yield from re.sub(r"\\\n\s*", " ", block).splitlines()
    yield from SPAN.findall(FENCE.sub("", text))


def words_of(line: str) -> list[str]:
    """Return the words of the first command of a line."""
    line = re.split(r"\s*(?:[|;]|&&|\s#)", line.strip().removeprefix("$ "), maxsplit=1)[0]
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def wrong_command(words: list[str]) -> str | None:
    """Return the error in a command line of mlxsup, if it has one."""
    command: click.Command = root
    context = click.Context(root)
    known = {option for parameter in root.params for option in parameter.opts}
    for word in words:
        if word.startswith("-"):
            continue
        if command is root and (word == HELP_ALIAS or not re.fullmatch(r"[a-z][a-z-]*", word)):
            return None
        if command is root:
            word = ALIASES.get(word, (word,))[0]
        if not isinstance(command, click.Group):
            break
        child = command.get_command(context, word)
        if child is None:
            return f"mlxsup has no command {' '.join(words)!r}"
        command = child
        known |= {one for each in child.params for one in (*each.opts, *each.secondary_opts)}
    for word in words:
        option = word.partition("=")[0]
        if re.fullmatch(r"--[a-z][a-z-]*", option) and option not in known | {"--help"}:
            return f"{command.name} has no option {option}"
    return None


def wrong_commands(text: str) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in code(text):
        words = words_of(line)
        if words[:1] == ["mlxsup"] and (problem := wrong_command(words[1:])):
            yield problem
        if words[:1] == ["make"] and re.fullmatch(r"[a-z-]+", " ".join(words[1:])):
            yield from [f"make has no target {one}" for one in words[1:] if one not in targets]


# ---------------------------------------------------------------- what must be described


def undescribed() -> Iterator[str]:
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    keys = sorted({key for table in SECTIONS.values() for key, _ in reference.keys(table)})
    named: dict[str, Iterable[str]] = {
        "command": COMMANDS,
        "error code": ErrorCode,
        "state": State,
        "key": keys,
    }
    for kind, names in named.items():
        for name in map(str, names):
            if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text):
                yield f"the {kind} {name} is described nowhere"
    for heading, table in SECTIONS.items():
        yield from [f"{heading} {key} has no title" for key, field in reference.keys(table)
                    if not field.title]  # fmt: skip


def other_groups() -> Iterator[str]:
    """Yield the differences between the table of commands in docs/cli.md and the help's groups."""
    text = (ROOT / "docs" / "cli.md").read_text()
    rows = dict(re.findall(r"^\| ([^|]+?) \| (`.+`) \|$", text, re.MULTILINE))
    for title, group in GROUPS.items():
        if SPAN.findall(rows.get(title, "")) != list(group):
            yield f"cli.md has other commands than the help under {title!r}: {', '.join(group)}"


def other_transitions() -> Iterator[str]:
    """Yield the differences between the table of states in docs/architecture.md and `LEAVES_TO`."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE))
    for state, leads in LEAVES_TO.items():
        if {one for one in State if re.search(rf"\b{one}\b", rows.get(state, ""))} != leads:
            yield f"architecture.md: {state} leads to {', '.join(sorted(leads))}"


def main() -> int:
    """Prints every problem; 1 if there is one."""
    problems = [
        f"docs: {problem}" for problem in (*undescribed(), *other_groups(), *other_transitions())
    ]
    wrong = (wrong_command(suggested.split()) for suggested in HABITS.values())
    problems += [f"HABITS: {problem}" for problem in wrong if problem]
    if reference.EXAMPLE.read_text() != reference.example():
        problems.append("config.example.toml: not that of the code; run make reference")
    if reference.SCHEMA.read_text() != reference.schema():
        problems.append("cli/mlxsup.schema.json: not that of the code; run make reference")
    for document in DOCUMENTS:
        text = document.read_text()
        found = [*broken_links(document, text), *missing_files(text), *wrong_commands(text)]
        problems += [f"{document.relative_to(ROOT)}: {problem}" for problem in found]
    print(*problems, sep="\n" if problems else "")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
