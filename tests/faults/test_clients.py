"""Clients that go, stop, flood, or reuse ids, and what it costs the others (P1, P15, P16).

Hostile frames, wrong types and wrong versions: tests/integration/test_bad_input.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest

from mlxsup.client import Client

from support.bad.input import generate, header, pack
from support.client.raw_client import RawClient
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually

STREAMS = 4
FLOOD = 4000
READ_ALL = """
import sys
from mlxsup.client import Client
with Client(sys.argv[1]) as client:
    streams = [
        client.generate("m", prompt=f"{sys.argv[2]} {n}", max_tokens=3000) for n in range(4)
    ]
    next(streams[0])
    print("reads", flush=True)
    for stream in streams:
        try:
            text = "".join(delta.text for delta in stream)
            print("whole" if text in stream.result.text else "torn", flush=True)
        except Exception as error:
            print(getattr(error, "code", type(error).__name__), flush=True)
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    model = fake(fake={"step_s": 0.002}, max_concurrency=8)
    daemon = Daemon({"m": model, "other": fake(fake={"step_s": 0.005})})
    with daemon.config.open("a") as config:
        config.write("[clients.beside]\n")
    with daemon:
        with daemon.client() as client:
            for name in ("m", "other"):
                wait_for_state(client, name, "READY")
        yield daemon
        with daemon.client() as client:
            assert [row(client, name)["generation"] for name in ("m", "other")] == [1, 1]


def reader_process(daemon: Daemon, prompt: str) -> subprocess.Popen[str]:
    """A client in a separate process that has begun to read four streams."""
    process = subprocess.Popen(
        [sys.executable, "-c", READ_ALL, daemon.endpoint, prompt],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "reads\n"
    return process


def is_quiet(client: Client) -> bool:
    """Whether nothing runs or waits on `m`."""
    seen = row(client, "m")
    return not seen["running"] and not seen["queued"]


def test_a_client_that_is_gone_costs_nobody_a_token_P1_D12(daemon: Daemon) -> None:
    with daemon.client() as client:
        process = reader_process(daemon, "gone")
        beside = Reader(client, "m", "beside", max_tokens=200).started()
        assert len(row(client, "m")["running"]) > 1
        process.kill()
        process.communicate(timeout=60)
        eventually(lambda: len(row(client, "m")["running"]) <= 1)
        assert beside.finished().token_ids == undisturbed("beside", 200)
        eventually(lambda: is_quiet(client))


def test_a_client_that_is_stopped_is_bounded_and_ends_with_slow_consumer_P15_H7(
    daemon: Daemon,
) -> None:
    assert daemon.process is not None
    supervisor = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        before = supervisor.memory_info().rss
        process = reader_process(daemon, "[[fault big=20000]] stopped")
        process.send_signal(signal.SIGSTOP)
        beside = Reader(client, "m", "beside", max_tokens=300).started()
        # Sixty megabytes are on their way to nobody.
        eventually(lambda: len(row(client, "m")["running"]) <= 1, timeout_s=60.0)
        assert beside.finished().token_ids == undisturbed("beside", 300)
        assert supervisor.memory_info().rss - before < 64 * 2**20
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate(timeout=60)
        assert said.split() == ["slow_consumer"] * STREAMS


def test_a_client_that_reads_late_stalls_only_itself_and_misses_nothing_H7(
    daemon: Daemon,
) -> None:
    with RawClient(daemon.endpoint) as late, daemon.client() as client:
        late.say(generate(pack({"prompt": "late", "max_tokens": 1000}), id="late"))
        beside = Reader(client, "m", "beside", max_tokens=300)
        assert beside.finished().token_ids == undisturbed("beside", 300)
        eventually(lambda: is_quiet(client), timeout_s=60.0)  # all of it is said by now
        seen: list[int] = []
        count = 0
        while (message := late.hear_any())["type"] != "done":
            for delta in message["deltas"] if message["type"] == "deltas" else ():
                seen.append(delta["seq"])
                count += len(delta["tokens"]) // 4
        assert (message["id"], count) == ("late", 1000)
        assert seen == sorted(seen)
        assert (seen[0], message["seq"]) == (0, 1000)


def test_a_flood_of_requests_is_refused_or_served_and_others_are_served_P16(
    daemon: Daemon,
) -> None:
    body = pack({"prompt": "flood", "max_tokens": 2})
    with RawClient(daemon.endpoint) as flood, daemon.client() as client:
        ends: Counter[str] = Counter()
        ids: set[str] = set()

        def hear_until(count: int) -> None:
            while len(ids) < count:
                message = flood.hear(60.0)
                assert message["id"] not in ids, "two ends"
                ids.add(message["id"])
                is_done = message["type"] == "done"
                ends["done" if is_done else message["error"]["code"]] += 1

        for number in range(FLOOD):
            flood.say(generate(body, id=f"f{number}"))
            if number % 1000 == 999:
                # Where the flood takes long, one who reads nothing all the while is given up.
                hear_until(number // 2)
        other = Reader(client, "other", "beside", max_tokens=50, client="beside")
        same = Reader(client, "m", "beside", max_tokens=50, client="beside")
        hear_until(FLOOD)
        assert set(ends) == {"done", "overloaded"}
        assert ends["done"] >= 64, ends
        assert other.finished().token_ids == undisturbed("beside", 50)
        assert same.finished().token_ids == undisturbed("beside", 50)
        eventually(lambda: is_quiet(client))


def test_duplicate_and_unknown_ids_harm_no_stream_P1(daemon: Daemon) -> None:
    body = pack({"prompt": "twice", "max_tokens": 1000})
    with RawClient(daemon.endpoint) as peer, RawClient(daemon.endpoint) as namesake:
        peer.say(generate(body, id="a"))
        namesake.say(generate(body, id="a"))  # another's id is another's
        peer.say(generate(body, id="a"))
        refused = peer.hear_error()
        assert (refused["id"], refused["error"]["code"]) == ("a", "duplicate_id")
        for unknown in ("never", "b" * 128, "ö"):
            peer.say([header("cancel", id=unknown)])
        peer.say([header("ping", id="p")])
        assert peer.hear()["id"] == "p"
        for one in (peer, namesake):
            done = one.hear()
            assert (done["type"], done["id"]) == ("done", "a")
            assert done["usage"]["completion_tokens"] == 1000
        peer.say(generate(pack({"prompt": "again", "max_tokens": 1}), id="a"))
        assert peer.hear()["type"] == "done", "an id that has ended may be used again"


def test_a_client_that_comes_and_goes_in_the_same_instant_leaves_nothing_P18(
    daemon: Daemon,
) -> None:
    assert daemon.process is not None
    supervisor = psutil.Process(daemon.process.pid)
    with daemon.client() as client:
        client.ping()
        before = supervisor.num_fds()
        for number in range(50):
            with RawClient(daemon.endpoint) as peer:
                peer.say(generate(pack({"prompt": f"n{number}"}), id="x"))
        eventually(lambda: is_quiet(client), timeout_s=60.0)
        eventually(lambda: supervisor.num_fds() <= before, timeout_s=60.0)
