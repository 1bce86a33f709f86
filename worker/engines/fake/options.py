"""The options of the fake engine, from a launch spec, and how it fails on demand."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.states import Batching
from mlxsup.protocol.tasks import Task

LOAD_ERRORS = ("missing", "bad", "memory", "device", "exception")
STALLS = ("sleep", "busy", "gil")
CRASH_SIGNALS = (
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "SIGBUS",
    "SIGILL",
    "SIGFPE",
    "SIGTRAP",
    "SIGTERM",
    "SIGSTOP",
)

MAX_VOICE_BYTES = 64

NAMES: Mapping[Any, str] = {str: "text", int: "an integer", float: "a number"}


class FakeOptionError(Exception):
    """An option of the fake engine is unknown or wrong; the message names it (exit 64)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeOptions:
    """What `LaunchSpec.fake` may hold; docs: the module docstring of `fake_engine`.

    Attributes:
        load_s: how long a load takes.
        load_steps: how many times it reports progress.
        load_error: `missing`, `bad`, `memory`, `device` or `exception`, half-way through.
        load_stall: `sleep`, `busy` or `gil`: half-way through, the load stops for good.
        crash_in_load: as `crash`, half-way through.
        load_fault_generations: the three faults above strike generations up to this; 0 for all.
        step_s: how long each step takes.
        pass_s: if above 0, a step reads a chunk of every prompt, not of one, and takes that much
            longer than a step that reads none; requests that come together wait for each other.
        predicted_s: what `predict_step_s` returns; `step_s` if negative.
        prefill_tokens_per_step: prompt tokens that one step processes.
        context_length: the model's; the launch spec's own limit still applies.
        answer_tokens: every answer ends with `stop` after this many tokens; 0 for never.
        active_bytes: how much memory it claims to hold, besides its rows.
        cache_bytes: how much more it claims to keep for reuse while it knows the prompt of a row
            that was removed.
        token_bytes: what it claims to keep for each token of a row, padded to the longest; 0: its
            rows take nothing.
        tokenize_s: how long each prompt's preparation takes.
        children: processes that it starts with the load and never ends.
        batching: what READY says about how rows may be batched, unless an earlier life knows;
            answers do not depend on it.
        warning: READY's warning; empty for none.
        voice: models of different voices give different answers to the same prompt.
        task: what it is for: `generate`, `embed` or `rerank`.
        takes_pictures: if so, a picture is the length of its file.
    """

    load_s: float = 0.0
    load_steps: int = 4
    load_error: str = ""
    load_stall: str = ""
    crash_in_load: str = ""
    load_fault_generations: int = 0
    step_s: float = 0.0
    pass_s: float = 0.0
    predicted_s: float = -1.0
    prefill_tokens_per_step: int = 512
    context_length: int = 4096
    answer_tokens: int = 0
    active_bytes: int = 0
    cache_bytes: int = 0
    token_bytes: int = 0
    tokenize_s: float = 0.0
    children: int = 0
    batching: str = Batching.TOGETHER.value
    warning: str = ""
    voice: str = ""
    task: str = Task.GENERATE.value
    takes_pictures: bool = False

    def __post_init__(self) -> None:
        _check_choice("load_error", self.load_error, ("", *LOAD_ERRORS))
        _check_choice("load_stall", self.load_stall, ("", *STALLS))
        _check_choice("task", self.task, tuple(task.value for task in Task))
        _check_choice("batching", self.batching, tuple(mode.value for mode in Batching))
        if self.crash_in_load:
            check_crash("crash_in_load", self.crash_in_load)
        if len(self.voice.encode()) > MAX_VOICE_BYTES:
            raise FakeOptionError(
                f"the fake engine's voice must have at most {MAX_VOICE_BYTES} bytes"
            )
        lowest = {
            "load_steps": 1,
            "prefill_tokens_per_step": 1,
            "context_length": 2,
            "token_bytes": 0,
        }
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise FakeOptionError(
                    f"the fake engine's {name} must be an integer of {low} or more"
                )

    @property
    def cache_layers(self) -> tuple[CacheLayers, ...]:
        """Return the caches that its layers are said to keep for each row."""
        if not self.token_bytes:
            return ()
        return (CacheLayers(layers=1, token_bytes=self.token_bytes),)

    @classmethod
    def from_map(cls, values: Mapping[str, Any]) -> FakeOptions:
        """Reads the options of a launch spec.

        Raises:
            FakeOptionError: names the option that is unknown or wrong.
        """
        kinds: dict[str, Callable[[Any], Any]] = {f.name: type(f.default) for f in fields(cls)}
        checked: dict[str, Any] = {}
        for name, value in values.items():
            kind = kinds.get(name)
            if kind is None:
                known = ", ".join(sorted(kinds))
                raise FakeOptionError(
                    f"the fake engine has no option {name!r}; its options are {known}"
                )
            accepted = (int, float) if kind is float else (kind,)
            if type(value) not in accepted:
                raise FakeOptionError(f"the fake engine's {name} must be {NAMES[kind]}")
            checked[name] = kind(value)
        return cls(**checked)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = ", ".join(filter(None, choices))
        raise FakeOptionError(f"the fake engine's {name} must be one of {known}, not {value!r}")


def check_crash(name: str, how: str) -> None:
    """Refuses values that `crash` cannot handle.

    Raises:
        FakeOptionError: it is neither a signal's name nor `exit:N`.
    """
    kind, _, code = how.partition(":")
    if kind == "exit" and code.isdigit() and int(code) < 256:
        return
    if how not in CRASH_SIGNALS:
        known = ", ".join(CRASH_SIGNALS)
        raise FakeOptionError(f"{name} must be exit:N or one of {known}, not {how!r}")


def crash(how: str) -> None:
    """Ends this process as asked: `exit:70`, or by a signal to itself."""
    if how.startswith("exit:"):
        os._exit(int(how.removeprefix("exit:")))
    os.kill(os.getpid(), getattr(signal, how))


def start_child() -> None:
    """Starts a process that waits forever, in this one's group."""
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    subprocess.Popen(sleep, stdin=subprocess.DEVNULL)


def stall(how: str) -> None:
    """Never returns: `sleep` and `busy` let other threads run, `gil` does not."""
    if how == "gil":
        # PyDLL keeps the GIL during the call; a signal only ends one sleep of many.
        native_sleep = ctypes.PyDLL(None).sleep
        while True:
            native_sleep(3600)
    while True:
        if how == "sleep":
            time.sleep(3600)
