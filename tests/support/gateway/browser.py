"""A real browser without a window: Chromium, driven over two pipes by its own protocol."""

from __future__ import annotations

import itertools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

from support.eventually import TIMEOUT_S, eventually

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
NO_CHROMIUM = f"there is no browser: none of {', '.join(NAMES)} is on the PATH"

AXE = Path(__file__).parents[3] / "build" / "npm" / "node_modules" / "axe-core" / "axe.min.js"
NO_AXE = "there is no axe-core: npm install --prefix build/npm axe-core"

PROBLEMS = """axe.run({resultTypes: ['violations']}).then(({violations}) => violations.map(
    ({id, nodes}) => [id, nodes.map(({html, failureSummary}) => html + failureSummary)]))"""

BEYOND = """[...document.querySelectorAll('body *')].filter((one) =>
    !one.closest('.scroll, .skip, .log, pre, #chats')
    && one.getBoundingClientRect().right > innerWidth + 1
    ).map((one) => one.outerHTML.slice(0, 80))"""
"""What is beyond the right edge of the window."""

FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check",
    "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-extensions", "--disable-sync", "--no-sandbox",
    "--hide-scrollbars", "--force-device-scale-factor=1",
)  # fmt: skip

LAUNCH = """\
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for end, wanted in zip(ends, (3, 4)):
    os.dup2(end, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and writes answers to 4."""

KEYS = {
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
    " ": {"key": " ", "code": "Space", "windowsVirtualKeyCode": 32, "text": " "},
}

STANDING = """(async () => {
    const one = document.querySelector(%s);
    one.scrollIntoView({block: 'center'});
    const middle = ({x, y, width, height}) => [x + width / 2, y + height / 2];
    const before = middle(one.getBoundingClientRect());
    await new Promise((next) => setTimeout(next, 50));
    const now = middle(one.getBoundingClientRect());
    return String(now) === String(before) && one.contains(document.elementFromPoint(...now)) && now;
})()"""
"""The middle of an element, or false where it moves or is covered."""


class Browser:
    """One Chromium with one page; nothing of it is left behind.

    Attributes:
        problems: errors on the page's console, and uncaught exceptions.
        session: the tab that is used.
    """

    def __init__(self) -> None:
        assert CHROMIUM is not None, NO_CHROMIUM
        self.problems: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="mlxsup-browser-", dir="/tmp")
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.session = ""
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        arguments = [*FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        with (Path(self._folder) / "stderr.txt").open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(commands), str(events), CHROMIUM, *arguments],
                pass_fds=(commands, events),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        os.close(commands)
        os.close(events)
        self._reader = threading.Thread(target=self._read, name="browser", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        self.other_tab()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(TIMEOUT_S)
        os.close(self._commands)
        self._reader.join(TIMEOUT_S)
        os.close(self._events)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------ as a person does it

    def other_tab(self) -> str:
        """Open another tab, and use it from now on; return its session."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")
        return self.session

    def open(self, url: str) -> None:
        """Go to an address, and return once the page and its scripts are there."""
        self.ask("Page.navigate", url=url)
        self.until(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def use(self, session: str) -> None:
        """Bring a tab to the front, and use it from now on."""
        self.session = session
        self.ask("Page.bringToFront")

    def click(self, selector: str) -> None:
        """Click at the middle of an element, once it stands still and nothing lies over it."""
        script = STANDING % json.dumps(selector)
        x, y = eventually(lambda: self.evaluate(script), what=f"{selector}, standing still")
        for kind in ("mousePressed", "mouseReleased"):
            self.ask(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )  # fmt: skip

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key."""
        self.ask("Input.dispatchKeyEvent", type="keyDown", **KEYS[key])
        self.ask("Input.dispatchKeyEvent", type="keyUp", **KEYS[key])

    def size(self, width: int, height: int) -> None:
        """Give the window this size, in pixels."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip

    def scheme(self, name: str) -> None:
        """Prefer `dark` or `light`."""
        self.ask(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    def choose(self, selector: str, value: str) -> None:
        """Choose from a list."""
        self.evaluate(
            f"{{ const one = document.querySelector({selector!r}); one.value = {value!r};"
            " one.dispatchEvent(new Event('change')); }"
        )

    # ------------------------------------------------------------ looking

    def check_access(self, what: str = "") -> None:
        """Assert that no element is a problem for a screen reader, or beyond the window."""
        if AXE.is_file():
            if not self.evaluate("Boolean(window.axe)"):
                self.evaluate(f"{AXE.read_text()}; 0")
            assert self.evaluate(PROBLEMS) == [], what
        assert self.evaluate(BEYOND) == [], what

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression; of a promise, what it leads to."""
        done = self.ask(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in done, f"{script}: {done['exceptionDetails']}"
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Return once an expression is truthy."""
        eventually(lambda: self.evaluate(f"Boolean({script})"), what=script)

    def text(self, selector: str) -> str:
        """Return the text that an element shows."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def spoken(self) -> list[tuple[str, str]]:
        """Return role and name of everything that a screen reader knows, in order."""
        nodes = self.ask("Accessibility.getFullAXTree")["nodes"]
        return [
            (str(node["role"]["value"]), str(node.get("name", {}).get("value", "")))
            for node in nodes
            if not node["ignored"]
        ]

    # ------------------------------------------------------------ the pipes

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and return its answer."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session and not method.startswith("Target."):
            message["sessionId"] = self.session
        answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers[number] = answers
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        answer = answers.get(timeout=TIMEOUT_S)
        del self._answers[number]
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._events, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    self._answers[message["id"]].put(message)
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, said: dict[str, Any]) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.problems.append(str(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "assert"):
                self.problems.append(str(said["args"]))
            case "Log.entryAdded" if said["entry"]["level"] == "error":
                self.problems.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
