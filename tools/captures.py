"""Pictures of the command line for the README and the documents: `make captures`.

Runs its own daemon with the demo model in a temporary home, plays commands on a terminal,
and writes what the terminal showed to docs/images/ as SVG. The temporary home is shown as
/home/you; nothing else is retouched.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from mlxsup.client import Client

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
MODEL = ROOT / "models" / "smollm2"
COLUMNS = 96
ROWS = 40
TOP_SIZES = ((40, 16), (80, 20), (200, 20))
"""Columns and rows of the terminals on which `mlxsup top` is shown."""

LIMIT_S = 120.0
HOME_SHOWN = "/home/you"

CONFIGURATION = """\
[models.smollm2]
path = "models/smollm2"

[models.smollm2-copy]
path = "models/smollm2"
"""

FONT_FACES = re.compile(r"\s*@font-face \{.*?\}", re.S)
"""A picture on a page is not allowed to fetch fonts; the reader's own monospaced one serves."""


class Screen:
    """A command on a terminal, and everything it has written there.

    Args:
        home: the temporary home.
        arguments: of mlxsup.
        columns: of the terminal.
        rows: likewise.
    """

    def __init__(
        self, home: Path, *arguments: str, columns: int = COLUMNS, rows: int = ROWS
    ) -> None:
        self.text = ""
        self._leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        dropped = ("MLXSUP", "NO_COLOR", "COLUMNS", "LINES")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlxsup.cli", *arguments],
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=home,
            env=kept | {"HOME": str(home), "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(follower)

    def read_until(self, is_enough: Callable[[str], bool]) -> None:
        """Reads until the text satisfies the predicate."""
        until = time.monotonic() + LIMIT_S
        while not is_enough(self.text):
            if not self._read(until):
                raise SystemExit(f"this was not what was expected:\n{self.text}")

    def read_all(self) -> str:
        """Reads to the end of the command; gives everything it wrote."""
        until = time.monotonic() + LIMIT_S
        while self._read(until):
            pass
        os.close(self._leader)
        self.process.wait(LIMIT_S)
        return self.text

    def type(self, text: str) -> None:
        """Presses these keys."""
        os.write(self._leader, text.encode())

    def _read(self, until: float) -> bool:
        left_s = max(0.0, until - time.monotonic())
        if not select.select([self._leader], [], [], left_s)[0]:
            return False
        try:
            block = os.read(self._leader, 65536)
        except OSError:
            # Linux says so when the last process has closed the terminal.
            return False
        self.text += block.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(block)


def has(words: str, times: int) -> Callable[[str], bool]:
    """Whether a text has these words so often."""
    return lambda text: text.count(words) >= times


def settled(text: str) -> str:
    """What stands on the screen at the end: live lines are gone, and so are the prompt's codes."""
    text = re.sub(r"\x1b\[\?\d+[hl]\r?", "", text)
    lines = []
    for line in text.split("\n"):
        lines.append(re.split(r"\r\x1b\[K|\r", line)[-1])
    return "\n".join(lines).strip("\n")


def save(name: str, command: str, shown: str, home: Path) -> None:
    """Writes one picture: the command as it was typed, and what it showed."""
    # The terminal echoes Ctrl-C and the like, which is no part of the story.
    shown = settled(shown).replace("^C", "").replace("^D", "").rstrip()
    shown = shown.replace(str(home), HOME_SHOWN)
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.assemble(("$ ", "dim"), (command, "bold")))
    console.print(Text.from_ansi(shown), soft_wrap=False)
    write_svg(name, console)


def write_svg(name: str, console: Console) -> None:
    """Writes what a console has recorded."""
    svg = console.export_svg(title="mlxsup", unique_id=f"mlxsup-{name}")
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(FONT_FACES.sub("", svg))
    print(f"docs/images/{name}.svg")


def capture_commands(home: Path, client: Client) -> None:
    """Everything that needs a daemon that runs."""
    crash_one(client)
    save("status", "mlxsup status", Screen(home, "status").read_all(), home)
    save("error", "mlxsup load smolm2", Screen(home, "load", "smolm2").read_all(), home)
    capture_top(home, client)
    chat = Screen(home, "chat", "smollm2", "--max-tokens", "60", "-v")
    for number, turn in enumerate(["What is the capital of France?", "And of Italy?"], start=1):
        chat.read_until(has("> ", number))
        chat.type(f"{turn}\r")
        chat.read_until(has("tokens/s", number))
    chat.read_until(lambda text: text.rstrip(" ").endswith(">"))
    chat.type("\x04")
    save("chat", "mlxsup chat smollm2 --max-tokens 60 -v", chat.read_all(), home)


def capture_top(home: Path, client: Client) -> None:
    """`mlxsup top` while one model answers and the other is loaded, in each width."""
    question = [{"role": "user", "content": "Tell me a very long story about a supervisor."}]
    streams = [
        client.generate("smollm2", messages=question, max_tokens=4000, ignore_eos=True)
        for _ in range(3)
    ]
    for stream in streams:
        next(stream)
    client.pause(streams[-1].request_id)
    for columns, rows in TOP_SIZES:
        top = Screen(home, "top", columns=columns, rows=rows)
        top.read_until(has("answering", 1))
        client.restart("smollm2-copy")
        top.read_until(has("LOADING → READY", 1))
        top.type("j")
        top.read_until(has("> smollm2", 1))
        top.type("q")
        save_picture(f"top-{columns}", top.read_all(), columns, home)
    for stream in streams:
        stream.cancel()


def save_picture(name: str, shown: str, columns: int, home: Path) -> None:
    """Writes what a command that draws on the whole screen has drawn last."""
    last = re.sub(r"\x1b\[\?\d+[hl]", "", shown.split("\x1b[H")[-1]).replace(str(home), HOME_SHOWN)
    console = Console(record=True, width=columns, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    console.print(Text.from_ansi(last, no_wrap=True, overflow="crop"))
    write_svg(name, console)


def crash_one(client: Client) -> None:
    """Kills a worker and waits until it is back, so that `status` has something to tell."""
    name = "smollm2-copy"
    with client.events() as events:
        client.ping()
        pid = next(row["pid"] for row in client.status()["models"] if row["name"] == name)
        os.kill(pid, signal.SIGKILL)
        for change in events:
            if change["model"] == name and change["to"] == "READY":
                return


def main() -> None:
    """Makes all pictures and leaves nothing else behind."""
    if not MODEL.is_dir():
        raise SystemExit("there is no models/smollm2: run `make demo` first")
    with tempfile.TemporaryDirectory(prefix="mlxsup-c-", dir="/tmp") as name:
        home = Path(name)
        (home / "models").mkdir()
        (home / "models" / "smollm2").symlink_to(MODEL)
        (home / "mlxsup.toml").write_text(CONFIGURATION)
        daemon = Screen(home, "start", "--config", "mlxsup.toml")
        try:
            daemon.read_until(lambda text: text.count("→ READY") == 2)
            save("start", "mlxsup start --config mlxsup.toml", daemon.text, home)
            with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                capture_commands(home, client)
        finally:
            daemon.process.terminate()
            daemon.read_all()


if __name__ == "__main__":
    main()
