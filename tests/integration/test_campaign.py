"""Short campaigns, and bugs planted that they must see (P1, P17, J4).

Real: daemons with fake engines, hostile clients and workers that are killed.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest

from mlxsup.protocol import codec

from campaign.__main__ import SCENARIOS
from campaign.chaos import run_chaos
from campaign.hostile import decoded, through_sockets
from campaign.scenario import Place, Result, Scenario, Verdict
from campaign.soak import run_soak
from support.models.tiny_model import make_tiny_model

TESTS = Path(__file__).parents[1]
OWN_TESTS = ("chaos", "sockets", "decoder", "soak", "faults")

# A short run on a busy machine may take ten times the CPU time of a callback.
chaos = partial(run_chaos, 100, seed=2, models="a", limit_s=300.0)
sockets = partial(through_sockets, 700, seed=4, max_call_s=1.0)
soak = partial(run_soak, 0.0, every_s=0.0)
decoder = partial(decoded, 1000, seed=3, max_call_s=1.0)


def test_requests_outlive_kills_and_pauses_P1() -> None:
    values = chaos(kinds=("SIGKILL", "SIGSEGV", "unload", "pause"))
    assert values["violations"] == 0


def test_hostile_frames_break_no_stream_P17() -> None:
    values = sockets()
    assert values["answered"] >= 700


def test_hostile_frames_are_decoded_or_refused_P17() -> None:
    values = decoder()
    assert values["refused"] > 0.7 * 1000


def test_nothing_grows_in_ordinary_use_J4() -> None:
    values = soak()
    assert (values["crashes"], values["unloads"]) == (1, 1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_requests_reconcile_under_every_fault_P1() -> None:
    run_chaos(4000, seed=2)


@pytest.mark.slow
@pytest.mark.mlx
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if not s.name.startswith(OWN_TESTS)], ids=lambda s: s.name
)
def test_a_small_round_measures_every_figure(scenario: Scenario, tmp_path: Path) -> None:
    """What is timed in one small round is not judged; what is counted is."""
    result = Result(scenario)
    result.run(Place(tiny=make_tiny_model(tmp_path / "tiny"), is_small=True))
    if result.problem and result.problem_verdict is Verdict.NOT_SHOWN:
        pytest.skip(result.problem)
    assert not result.problem, result.problem
    for figure in scenario.figures:
        assert result.samples.get(figure.key), figure.what
        if figure.bound is not None and figure.bound.is_exact:
            assert result.verdict(figure) is Verdict.KEPT, (figure.what, result.samples)


def test_every_promise_of_a_daemon_has_a_scenario() -> None:
    promises = {promise for one in SCENARIOS for promise in one.promises.split()}
    assert {f"P{n}" for n in range(1, 34)} - promises == {"P22", "P27", "P28", "P30", "P31", "P33"}


def test_the_command_prints_one_table() -> None:
    command = [sys.executable, "-m", "campaign", "--small", "--only", "decoder"]
    done = subprocess.run(
        [*command, "--requests", "100"], cwd=TESTS, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[0].startswith("| promise | figure | on | with the fault |")
    assert done.stdout.count("| P17 |") == 4, done.stdout + done.stderr


# ---------------------------------------------------------------- planted bugs

ON_TAKE = """
from mlxsup.supervisor.sockets.clients import Clients
take, kept = Clients._take, []
def planted(self, connection, frames):
    {body}
    take(self, connection, frames)
Clients._take = planted
"""
ON_SEND = """
from mlxsup.supervisor.sockets.clients import Clients
from mlxsup.protocol.client_messages import Deltas, Done
send, seen = Clients.send, []
def planted(self, connection, message):
    is_delta = isinstance(message, Deltas)
    seen.append(1) if is_delta else None
    {body}
    send(self, connection, message)
Clients.send = planted
"""
NEVER_RESUMED = """
from mlxsup.supervisor.core.requests.ledger import Request
Request.may_resume = property(lambda self: False, lambda self, value: None)
"""
IS_ASKED = 'if b"generate" in frames[0]: '
BUGS: dict[str, tuple[Callable[..., object], str, str]] = {
    "nothing is resumed": (
        partial(chaos, kinds=("SIGKILL",)),
        NEVER_RESUMED,
        "unprovoked worker_crashed",
    ),
    "a piece is never sent": (
        sockets,
        ON_SEND.format(body="if is_delta and len(seen) == 50: return"),
        "stream of [mn]: ",
    ),
    "a buffer has no bound": (
        sockets,
        ON_TAKE.format(body="kept.append(bytearray(b'x' * 100_000))"),
        "RSS grew",
    ),
    "a message takes a second": (
        sockets,
        ON_TAKE.format(body="if b'\\xc1\\xc1' in frames[0]: kept or sum(range(10**8));"
                            " kept.append(1)"),
        "a callback of the loop took",
    ),
    "an answer is not the right one": (
        soak,
        ON_SEND.format(body="if len(seen) == 100 and is_delta: message.deltas[0].tokens ="
                            " message.deltas[0].tokens[::-1]"),
        "tokens: ",
    ),
    "a file is never closed": (
        soak, ON_TAKE.format(body=IS_ASKED + "kept.append(open('/dev/null'))"),
        "files of supervisor: between",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_the_supervisor_is_seen(bug: str) -> None:
    run, sabotage, seen = BUGS[bug]
    with pytest.raises(AssertionError, match=seen):
        run(sabotage=sabotage)


def with_unpacked(change: Callable[..., object]) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what plants a bug in how the decoder unpacks."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(msgpack, "unpackb", partial(change, msgpack.unpackb))

    return plant


def without_limits(unpackb: Callable[..., object], frame: bytes, **options: Any) -> object:
    """Unpack containers of any size."""
    limits = ("max_array_len", "max_map_len", "max_str_len")
    return unpackb(frame, **{name: v for name, v in options.items() if name not in limits})


def with_any_number(unpackb: Callable[..., Any], frame: bytes, **options: Any) -> object:
    """Let NaN pass for a number."""
    value = unpackb(frame, **options)
    if not isinstance(value, dict):
        return value
    is_bad = {k: isinstance(v, float) and not math.isfinite(v) for k, v in value.items()}
    return {k: 1.0 if is_bad[k] else v for k, v in value.items()}


def with_another_error(unpackb: Callable[..., object], frame: bytes, **options: Any) -> object:
    """Raise what the decoder does not expect of msgpack."""
    try:
        return unpackb(frame, **options)
    except ValueError as error:
        raise LookupError(str(error)) from None


def with_any_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpack headers of any length before they are refused."""
    monkeypatch.setattr(codec, "MAX_HEADER_BYTES", 2**30)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (with_unpacked(without_limits), "bytes were allocated for one message"),
        (with_any_header, "bytes were allocated for one message"),
        (with_unpacked(with_another_error), "LookupError"),
        (with_unpacked(with_any_number), "NaN: decoded instead of invalid_request"),
    ],
)
def test_a_bug_planted_in_the_decoder_is_seen_P17(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None], seen: str
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=seen):
        decoder()
