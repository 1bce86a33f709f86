"""The guard around an engine: every call passes on, from one thread alone."""

from __future__ import annotations

import faulthandler
import threading
from typing import Any

import pytest

from mlxsup.protocol.ids import RequestKey
from mlxsup.worker.thread_guard import OwnedEngine, WrongThreadError

CALLS: dict[str, tuple[Any, ...]] = {
    "load": ("report",),
    "insert": ("row",),
    "remove": (RequestKey(1), RequestKey(2)),
    "drop_kept": (RequestKey(3), RequestKey(4)),
    "free_kept": (),
    "has_rows": (),
    "row_count": (),
    "predict_step_s": (),
    "prefill_chunk": (),
    "has_long_prompt": (),
    "has_decoding": (),
    "shared_pass_s": (7,),
    "step": (),
    "decode": (),
    "settle": (),
    "give_back": (),
    "bound_rows": (9,),
    "bytes_held": (),
    "close": (),
}
PASSED_ON = {"give_back": (False,), "free_kept": (None,)}
"""What is passed on of a call that leaves out what it need not give."""
GIVES_NOTHING = {
    "remove", "drop_kept", "free_kept", "settle", "give_back", "bound_rows", "close",
}  # fmt: skip


class Recorder:
    """An engine that notes what is called, and gives a different value for each."""

    def __init__(self) -> None:
        self.text: Any = object()
        self.calls: list[tuple[Any, ...]] = []
        self.predicted_s: Any = "value of predict_step_s"

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, *arguments, *named.values()))
            return self.predicted_s if name == "predict_step_s" else f"value of {name}"

        return call


def owned() -> tuple[OwnedEngine, Recorder]:
    recorder = Recorder()
    return OwnedEngine(recorder, 30.0), recorder


@pytest.mark.parametrize("name", CALLS)
def test_a_call_passes_on_with_what_it_is_given_and_gives(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    engine, recorder = owned()
    value = getattr(engine, name)(*CALLS[name])
    assert value == (None if name in GIVES_NOTHING else f"value of {name}")
    assert recorder.calls == [(name, *PASSED_ON.get(name, CALLS[name]))]


@pytest.mark.parametrize("name", [*CALLS, "text"])
def test_another_thread_is_refused_by_name_A1(name: str) -> None:
    engine, recorder = owned()
    refused: list[str] = []

    def use() -> None:
        with pytest.raises(WrongThreadError) as caught:
            engine.text if name == "text" else getattr(engine, name)(*CALLS[name])
        refused.append(str(caught.value))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    owner = threading.get_ident()
    assert refused == [f"the engine belongs to thread {owner}, not to {thread.ident}"]
    assert recorder.calls == []


def test_what_a_call_names_passes_on_by_its_name() -> None:
    engine, recorder = owned()
    for keep in (True, False):
        kept: object = engine.set_aside(RequestKey(1), RequestKey(2), keep=keep)
        assert kept == "value of set_aside"
        assert recorder.calls.pop() == ("set_aside", RequestKey(1), RequestKey(2), keep)
    engine.free_kept(spared=RequestKey(5))
    engine.give_back(keeps_prefixes=True)
    assert recorder.calls == [("free_kept", RequestKey(5)), ("give_back", True)]


def test_no_other_thread_sets_a_row_aside_A1() -> None:
    engine, recorder = owned()
    refused: list[type[BaseException]] = []

    def use() -> None:
        with pytest.raises(WrongThreadError) as caught:
            engine.set_aside(RequestKey(1), keep=True)
        refused.append(caught.type)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    assert (refused, recorder.calls) == ([WrongThreadError], [])


def test_the_text_side_is_the_engines() -> None:
    engine, recorder = owned()
    assert engine.text is recorder.text


@pytest.mark.parametrize("is_broken", [False, True])
def test_where_nothing_else_ends_a_wedged_step_a_timer_does_E6(
    monkeypatch: pytest.MonkeyPatch, is_broken: bool
) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    engine, recorder = owned()
    recorder.predicted_s = 2.5
    timers: list[tuple[object, ...]] = []
    monkeypatch.setattr(
        faulthandler,
        "dump_traceback_later",
        lambda limit_s, *, exit: timers.append((limit_s, exit, list(recorder.calls))),
    )
    monkeypatch.setattr(
        faulthandler,
        "cancel_dump_traceback_later",
        lambda: timers.append(("cancelled", list(recorder.calls))),
    )
    if is_broken:

        def broken() -> None:
            raise ValueError("broken")

        monkeypatch.setattr(recorder, "step", broken, raising=False)
        with pytest.raises(ValueError, match="broken"):
            engine.step()
        steps = []
    else:
        stepped: object = engine.step()
        assert stepped == "value of step"
        steps = [("step",)]
    predicted = ("predict_step_s",)
    assert timers == [
        (10 * (30.0 + 4 * 2.5), True, [predicted]),
        ("cancelled", [predicted, *steps]),
    ]


@pytest.mark.parametrize(("platform", "has_timer"), [("linux", False), ("darwin", True)])
def test_the_timer_is_for_systems_without_pdeathsig(
    monkeypatch: pytest.MonkeyPatch, platform: str, has_timer: bool
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    engine, recorder = owned()
    recorder.predicted_s = 0.0
    timers: list[str] = []
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faulthandler, name, lambda *_, name=name, **__: timers.append(name))
    for step in (engine.step, engine.decode):
        timers.clear()
        step()
        assert bool(timers) is has_timer
