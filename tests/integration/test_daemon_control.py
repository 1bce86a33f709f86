"""load, unload, restart, stop and signals, while streams run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from mlxsup.client import Client, ConnectionLost, RequestError

from support.daemon import Daemon, fake, gone_within, is_alive, row, wait_for_state
from support.eventually import eventually
from support.streams import Reader

SLOW = {"step_s": 0.02}


@pytest.fixture
def pair() -> Iterator[Daemon]:
    models = {"one": fake(fake=SLOW, max_concurrency=2), "two": fake(fake=SLOW)}
    with Daemon(models) as daemon:
        with daemon.client() as client:
            for name in models:
                client.load(name)
        yield daemon


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """Runs callables at once; returns their results."""
    results: list[object] = [None] * len(calls)

    def run(number: int) -> None:
        results[number] = calls[number]()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_restart_drains_while_the_other_streams_F14_E8(pair: Daemon) -> None:
    with pair.client() as client:
        alone = client.complete("two", prompt="other", max_tokens=150)
        other = Reader(client, "two", "other", max_tokens=150).started()
        running = Reader(client, "one", "runs", max_tokens=40).started()
        before = row(client, "one")
        finished = pair.run("restart", "one")
        assert finished.returncode == 0, finished.stderr
        assert running.finished().finish_reason == "length", "it was allowed to finish"
        assert len(running.tokens) == 40
        after = row(client, "one")
        assert (after["state"], after["generation"]) == ("READY", before["generation"] + 1)
        assert after["pid"] != before["pid"]
        assert not psutil.pid_exists(before["pid"]) or not is_alive(psutil.Process(before["pid"]))
        assert other.finished().token_ids == alone.token_ids
        assert row(client, "two")["generation"] == 1


def test_restart_now_does_not_wait_and_the_queue_survives_F14(pair: Daemon) -> None:
    with pair.client() as client:
        running = [
            Reader(client, "one", f"r{n}", max_tokens=3000, resume=False).started()
            for n in range(2)
        ]
        queued = Reader(client, "one", "queued", max_tokens=5)
        eventually(lambda: row(client, "one")["queued"] == 1)
        client.restart("one", now=True)
        assert [reader.failed().code for reader in running] == ["worker_crashed"] * 2
        assert len(queued.finished().token_ids) == 5
        assert row(client, "one")["generation"] == 2


def test_four_restarts_at_once_make_one_new_generation_F14(pair: Daemon) -> None:
    with pair.client() as client:
        running = Reader(client, "one", "runs", max_tokens=250).started()
        in_threads(*[lambda: client.restart("one") for _ in range(4)])
        assert running.finished().finish_reason == "length"
        assert row(client, "one")["generation"] == 2


def test_unload_ends_the_process_I1(pair: Daemon) -> None:
    with pair.client() as client:
        worker = psutil.Process(row(client, "one")["pid"])
        finished = pair.run("unload", "one")
        assert finished.returncode == 0, finished.stderr
        assert not is_alive(worker)
        after = row(client, "one")
        assert (after["state"], after["pid"], after["footprint_bytes"]) == ("STOPPED", None, 0)
        assert client.complete("one", prompt="hi", max_tokens=2).finish_reason == "length"
        assert row(client, "one")["generation"] == 2


def test_unload_and_load_by_command_line(pair: Daemon) -> None:
    assert pair.run("unload", "one").returncode == 0
    loaded = pair.run("load", "one")
    assert loaded.returncode == 0
    assert "READY" in loaded.stdout
    unknown = pair.run("load", "onne")
    assert unknown.returncode == 1
    assert "one" in unknown.stderr
    assert "Traceback" not in unknown.stderr


def test_cancel_ends_a_stream_and_frees_its_place_D3(pair: Daemon) -> None:
    with pair.client() as client:
        readers = [Reader(client, "one", f"r{n}", max_tokens=3000).started() for n in range(2)]
        follow_up = Reader(client, "one", "next", max_tokens=3)
        eventually(lambda: row(client, "one")["queued"] == 1)
        readers[0].stream.cancel()
        result = readers[0].finished()
        assert result.finish_reason == "cancelled"
        assert len(follow_up.finished().token_ids) == 3, "it did not wait for the cancelled one"
        assert readers[1].is_alive()
        readers[1].stream.cancel()
        readers[1].finished()


def test_a_client_that_dies_is_a_cancel_of_all_it_asked_D12(pair: Daemon) -> None:
    code = (
        "import sys, time\n"
        "from mlxsup.client import Client\n"
        "client = Client(sys.argv[1])\n"
        "streams = [client.generate('one', prompt='x', max_tokens=3000) for _ in range(5)]\n"
        "next(iter(streams[0])); print('streaming', flush=True); time.sleep(600)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, pair.endpoint], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "streaming\n"
        with pair.client() as client:
            eventually(
                lambda: (len(row(client, "one")["running"]), row(client, "one")["queued"]) == (2, 3)
            )
            child.kill()
            eventually(
                lambda: row(client, "one")["running"] == [] and not row(client, "one")["queued"]
            )
            assert client.complete("one", prompt="free", max_tokens=2).finish_reason == "length"
            assert row(client, "one")["generation"] == 1


def test_every_kind_of_input_passes_one_gate_H2() -> None:
    limits = {"max_queue": 1, "max_queue_per_client": 1}
    daemon = Daemon({"m": fake(fake=SLOW, max_concurrency=1)}, limits)
    with daemon, daemon.client() as client:
        running = Reader(client, "m", "runs", max_tokens=3000).started()
        queued = Reader(client, "m", "waits", max_tokens=1)
        eventually(lambda: row(client, "m")["queued"] == 1)
        inputs = (
            {"prompt": "x"},
            {"prompt_tokens": [300, 301]},
            {"messages": [{"role": "user", "content": "x"}]},
        )
        for given in inputs:
            with pytest.raises(RequestError) as caught:
                client.complete("m", max_tokens=1, **given)
            assert caught.value.code == "overloaded"
            assert caught.value.detail["running"] == [running.stream.request_id]
        running.stream.cancel()
        running.finished()
        queued.finished()


def test_the_queue_of_a_model_that_loads_shuts_no_other_and_no_name_opens_it_H5() -> None:
    limits = {"max_queue": 6, "max_queue_per_client": 6}
    models = {"m": fake(), "slow": fake(fake={"load_s": 60.0}, preload=False)}
    with Daemon(models, limits) as daemon, daemon.client() as one, daemon.client() as other:
        one.load("m")
        held = [
            client.generate("slow", prompt="x", max_tokens=1, client=f"name {n}")
            for client in (one, other)
            for n in range(3)
        ]
        eventually(lambda: row(one, "slow")["queued"] == 6)
        with daemon.client() as third, pytest.raises(RequestError) as full:
            third.complete("slow", prompt="x", max_tokens=1)
        assert full.value.detail["limit"] == "max_queue"
        with pytest.raises(RequestError) as caught:
            one.complete("slow", prompt="x", max_tokens=1, client="another name")
        assert caught.value.code == "overloaded"
        assert one.complete("m", prompt="x", max_tokens=2).finish_reason == "length"
        for stream in held:
            stream.cancel()
            assert list(stream) == []


def test_one_bad_request_fails_alone_C7(pair: Daemon) -> None:
    with pair.client() as client:
        good = Reader(client, "one", "good", max_tokens=60).started()
        bad: tuple[dict[str, Any], ...] = (
            {"prompt": "x" * 5000, "max_tokens": 1},
            {"prompt_tokens": [4_000_000], "max_tokens": 1},
            {"messages": [{"role": "user", "content": "[[tokenize raise]]"}], "max_tokens": 1},
        )
        codes = []
        for given in bad:
            with pytest.raises(RequestError) as caught:
                client.complete("one", **given)
            codes.append(caught.value.code)
        assert codes == ["context_length_exceeded", "invalid_request", "invalid_request"]
        assert len(good.finished().token_ids) == 60
        assert row(client, "one")["generation"] == 1


# ---------------------------------------------------------------- the end


def test_stop_lets_streams_finish_and_returns_when_every_process_is_gone_E1_E3_E5() -> None:
    with Daemon({"m": fake(fake=SLOW, max_concurrency=1)}) as daemon:
        with daemon.client() as client:
            running = Reader(client, "m", "runs", max_tokens=200).started()
            queued = Reader(client, "m", "waits", max_tokens=5)
            eventually(lambda: row(client, "m")["queued"] == 1)
            processes = daemon.processes()
            stopped = daemon.run("stop")
            assert stopped.returncode == 0, stopped.stderr
            assert [p for p in processes if is_alive(p)] == []
            assert running.finished().finish_reason == "length"
            assert queued.failed().code == "shutting_down"
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0
        assert not (daemon.folder / "run" / "client.sock").exists()
        assert daemon.run("stop").returncode == 69


def test_sigterm_answers_everyone_within_the_grace_E1() -> None:
    with Daemon({"m": fake(fake=SLOW)}, {"drain_timeout_s": 0.5}) as daemon:
        with daemon.client() as client:
            running = Reader(client, "m", "runs", max_tokens=4000).started()
            processes = daemon.processes()
            os.kill(processes[0].pid, signal.SIGTERM)
            assert running.failed().code == "shutting_down"
            gone_within(processes, 60.0)
        assert daemon.process is not None
        assert daemon.process.wait(60) == 0


def test_a_second_interrupt_ends_at_once() -> None:
    daemon = Daemon({"m": fake(fake=SLOW)}, {"drain_timeout_s": 300.0})
    with daemon, daemon.client() as client:
        running = Reader(client, "m", "runs", max_tokens=4000).started()
        processes = daemon.processes()
        os.kill(processes[0].pid, signal.SIGINT)
        wait_for_state(client, "m", "DRAINING")
        os.kill(processes[0].pid, signal.SIGINT)
        assert running.failed().code == "shutting_down"
        gone_within(processes, 60.0)


def test_a_supervisor_that_dies_gives_connection_lost() -> None:
    daemon = Daemon({"m": fake(fake=SLOW)})
    daemon.start()
    with daemon.client() as client:
        running = Reader(client, "m", "runs", max_tokens=4000).started()
        processes = daemon.processes()
        daemon.kill()
        running.join(60.0)
        assert isinstance(running.error, ConnectionLost)
        gone_within(processes, 60.0)
        with pytest.raises(ConnectionLost):
            client.status()
    daemon.__exit__(None, None, None)


def test_a_second_daemon_says_who_runs() -> None:
    with Daemon({"m": fake()}) as daemon:
        assert daemon.process is not None
        second = subprocess.run(
            daemon.command("start", "--config", str(daemon.config)),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert second.returncode == 75
        assert str(daemon.process.pid) in second.stderr
        with Client(daemon.endpoint) as client:
            assert client.complete("m", prompt="hi", max_tokens=2).finish_reason == "length"
