"""One worker over two ranks, with the fake engine: real agents and followers, local and by ssh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from mlxsup.cli.exit_status import ExitStatus
from mlxsup.protocol.launch import ExitCode, GroupHost
from mlxsup.protocol.states import FinishReason, LoadPhase
from mlxsup.protocol.worker_messages import Hello, Ready, Step
from mlxsup.worker.engines.fake.text import answer_tokens, encode_text
from mlxsup.worker.group.frames import Progress, pack_frame

from support.cli.cli import check_plain, run_cli
from support.eventually import eventually
from support.gateway.json_schemas import problems
from support.models.tiny_model import make_tiny_model
from support.worker.fake_ssh import FakeSsh
from support.worker.worker_harness import WorkerHarness

LOCAL = (GroupHost(), GroupHost())

ENDLESS = 4000
"""Tokens of an answer that is still running when the test is over, as is its context."""


def group(hosts: tuple[GroupHost, ...] = LOCAL, **options: Any) -> WorkerHarness:
    """Start a worker over these hosts, which a crash takes down with a traceback at most."""
    return WorkerHarness(hosts=hosts, log_may_hold=("Traceback",), **options)


class Processes:
    """The processes of a group, by what they do; none may be left behind.

    Args:
        worker: ready.
    """

    def __init__(self, worker: WorkerHarness) -> None:
        self.leader = psutil.Process(worker.process.pid)
        below = self.leader.children(recursive=True)
        self.all = [self.leader, *below]
        self.agent = self._running("group.agent", below)
        self.follower = self._running("group.follower", below)
        self.ssh = self.leader.children()[0]  # or the agent, if the host is this machine

    @staticmethod
    def _running(module: str, processes: list[psutil.Process]) -> psutil.Process:
        (found,) = (
            one
            for one in processes
            if any(word.endswith(module) for word in one.cmdline()) and "ssh" not in one.name()
        )
        return found

    def are_gone(self) -> bool:
        """Return True if none of them runs."""
        return all(_is_gone(one) for one in self.all)


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_as_the_supervisor_would(worker: WorkerHarness) -> int:
    """Wait for the leader's exit, and kill what is left of its group, as the supervisor does before
    it reaps."""
    os.waitid(os.P_PID, worker.process.pid, os.WEXITED | os.WNOWAIT)
    os.killpg(worker.process.pid, signal.SIGKILL)
    return worker.exit_code()


OTHER_VERSIONS = {
    "earlier": "from mlxsup.protocol import version\nversion.VERSION = '0.0.1'\n",
    "foreign": "from mlxsup.worker.group import frames\nframes.Greeting.TYPE = 'howdy'\n",
    "later": "from mlxsup.worker.group import frames\nframes.Who.TYPE = 'which'\n",
    "copying": (
        "from dataclasses import replace\n"
        "from mlxsup.worker.engines.fake import engine\n"
        "plain = engine.identify_fake\n"
        "engine.identify_fake = lambda spec: replace(plain(spec), fingerprint='other')\n"
    ),
}
"""Run first by an interpreter that stands for a host with another mlxsup, whose messages may be
different, or with other files."""


@pytest.fixture
def fake_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host is this machine but `nowhere`, which is not reached. There is an interpreter that
    has no mlxsup, one that does not know -P, one that prints something first, one that logs, and
    those of `OTHER_VERSIONS`."""
    for name, change in OTHER_VERSIONS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "sitecustomize.py").write_text(change)
    for name, script in (
        *((name, f'PYTHONPATH={tmp_path / name} exec {{0}} "$@"') for name in OTHER_VERSIONS),
        ("bare", 'exec {0} -S "$@"'),
        ("old", 'exec {0} -N "$@"'),
        ("chatty", 'echo hello\nexec {0} "$@"'),
        ("logging", 'echo "2026-01-01T00:00:00.1Z INFO x" >&2\nexec {0} "$@"'),
    ):
        path = tmp_path / f"{name}-python"
        path.write_text(f"#!/bin/sh\n{script.format(sys.executable)}\n")
        path.chmod(0o700)
    ssh = FakeSsh(tmp_path)
    ssh.cut_off("nowhere")
    monkeypatch.setenv("PATH", ssh.path)


def test_two_ranks_answer_as_one_and_exit_when_asked() -> None:
    with group() as worker:
        assert worker.wait_until_ready().ranks == [1]
        processes = Processes(worker)
        keys = [worker.dispatch(f"prompt {number}", max_tokens=40) for number in range(12)]
        gone = worker.dispatch("[[fault slow=0.01]] cancelled", max_tokens=ENDLESS)
        seeded = worker.dispatch("seeded", max_tokens=9, temperature=1.0, seed=7)
        worker.cancel(gone)
        for number, stream in enumerate(worker.finish(*keys)):
            assert stream.tokens == answer_tokens(encode_text(f"prompt {number}"), 40)
        (cancelled, drawn) = worker.finish(gone, seeded)
        assert cancelled.finish is FinishReason.CANCELLED
        assert len(drawn.tokens) == 9
        assert worker.ask_for_exit() == ExitCode.ASKED
        eventually(processes.are_gone, what="the end of all ranks")


@pytest.mark.parametrize(
    ("whom", "number", "when"),
    [
        ("follower", signal.SIGKILL, "decode"),
        ("follower", signal.SIGSTOP, "decode"),
        ("follower", signal.SIGKILL, "prefill"),
        ("follower", signal.SIGSTOP, "prefill"),
        ("agent", signal.SIGKILL, "idle"),
        ("agent", signal.SIGSTOP, "decode"),
        ("agent", signal.SIGSTOP, "idle"),
        ("agent", signal.SIGSTOP, "prefill"),
        ("agent", signal.SIGKILL, "prefill"),
        ("ssh", signal.SIGKILL, "prefill"),
    ],
)
def test_a_lost_rank_ends_the_group(
    whom: str, number: signal.Signals, when: str, fake_ssh: None
) -> None:
    # Far ranks have a session of their own, so no signal to the leader's group ends them.
    hosts = (GroupHost(), GroupHost(ssh="far")) if whom in ("agent", "ssh") else LOCAL
    with group(hosts, fake={"prefill_tokens_per_step": 1}) as worker:
        worker.wait_until_ready()
        processes = Processes(worker)
        if when != "idle":
            prompt = "[[fault slow=0.01]]" + "na " * (900 if when == "prefill" else 0)
            key = worker.dispatch(prompt, max_tokens=9 if when == "prefill" else ENDLESS)
            asked = worker.streams[key]
            while not (asked.tokens if when == "decode" else worker.wait_for(Step).prefill):
                worker.receive()
            assert bool(asked.tokens) is (when == "decode")
        getattr(processes, whom).send_signal(number)
        assert end_as_the_supervisor_would(worker) == ExitCode.RANK_LOST
        eventually(processes.are_gone, what="the end of all ranks")
        cause = worker.log().splitlines()[-1]
        assert f"rank 1 ({hosts[1].ssh or '127.0.0.1'})" in cause


@pytest.mark.parametrize("stuck", ["", "[[fault stall=gil at=3 rank=1]]"])
def test_no_rank_outlives_a_killed_leader(stuck: str, fake_ssh: None) -> None:
    """The follower runs in a session of its own, so nothing but its agent ends it."""
    with group((GroupHost(), GroupHost(ssh="far"))) as worker:
        worker.wait_until_ready()
        processes = Processes(worker)
        key = worker.dispatch(stuck or "[[fault slow=0.01]]", max_tokens=ENDLESS)
        eventually(lambda: worker.receive() and len(worker.streams[key].tokens) >= 3)
        if stuck:  # in the step of the third token, which every rank has begun
            worker.receive_what_is_there(timeout_s=1.0)
            assert len(worker.streams[key].tokens) == 3
        processes.leader.kill()
        eventually(processes.are_gone, what="the end of all ranks")


def test_the_agent_ends_its_rank_when_the_leader_is_silent() -> None:
    with group() as worker:
        worker.wait_until_ready()
        processes = Processes(worker)
        processes.leader.suspend()
        eventually(lambda: _is_gone(processes.follower), what="the end of the follower")
        processes.leader.resume()
        assert end_as_the_supervisor_would(worker) == ExitCode.RANK_LOST
        assert "no sign of the leader for 5 s" in worker.log().splitlines()[-1]


def test_an_agent_ends_its_rank_though_it_can_tell_nothing(tmp_path: Path) -> None:
    """Not on every system does a rank end by itself when its agent is gone."""
    (tmp_path / "sleeper.py").write_text("import signal\nsignal.pause()\n")
    run = "from mlxsup.worker.group import agent\nagent.FOLLOWER = 'sleeper'\nagent.main()\n"
    agent = subprocess.Popen(
        [sys.executable, "-c", run],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    [rank] = eventually(psutil.Process(agent.pid).children, what="the rank")
    assert agent.stdin is not None
    assert agent.stderr is not None
    agent.stderr.close()
    agent.stdin.close()
    agent.wait()
    assert _is_gone(rank)


def test_a_rank_ends_a_stopped_agent_though_it_was_told_nothing_yet() -> None:
    """The agent is a shell here, which neither closes the pipe to its rank nor sends anything."""
    run = f"{sys.executable} -P -m mlxsup.worker.group.follower; exit 0"
    agent = subprocess.Popen(["sh", "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdout.close()  # the connection to the leader
    assert agent.wait() == -signal.SIGKILL
    agent.stdin.close()


AGENT = """
import os, signal, subprocess, sys
os.dup2(2, 1)
rank = subprocess.Popen([sys.executable, "-P", "-m", "mlxsup.worker.group.follower"])
os.kill(os.getpid(), signal.SIGSTOP)
sys.exit(rank.wait())
"""


def test_a_stopped_agent_notices_that_its_rank_has_failed() -> None:
    """Its leader may be gone by then, and nothing else would end it."""
    agent = subprocess.Popen([sys.executable, "-c", AGENT], stdin=subprocess.PIPE)
    assert agent.stdin is not None
    agent.stdin.write(pack_frame(Progress(phase=LoadPhase.IMPORT, progress=0.0)))
    agent.stdin.flush()
    try:
        assert agent.wait(60.0) == ExitCode.BAD_LAUNCH
    finally:
        agent.kill()
        agent.stdin.close()
        agent.wait()


CONNECTION = """
import subprocess, sys
command = [sys.executable, "-P", "-m", "mlxsup.worker.group.agent"]
agent = subprocess.Popen(command, stdin=subprocess.PIPE)
print(agent.pid, flush=True)
agent.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_stopped_agent_without_a_rank_ends_with_the_connection() -> None:
    with subprocess.Popen([sys.executable, "-c", CONNECTION], stdout=subprocess.PIPE) as connection:
        assert connection.stdout is not None
        agent = psutil.Process(int(connection.stdout.readline()))
        [rank] = eventually(agent.children, what="the rank")
        agent.suspend()
        rank.kill()
        connection.kill()
    try:
        eventually(lambda: _is_gone(agent), what="the end of the agent")
    finally:
        if not _is_gone(agent):
            agent.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere an agent that is stopped stays")
@pytest.mark.parametrize("is_agent_stopped", [False, True])
def test_a_rank_that_is_stopped_as_it_starts_ends_with_the_connection(
    is_agent_stopped: bool,
) -> None:
    with subprocess.Popen([sys.executable, "-c", CONNECTION], stdout=subprocess.PIPE) as connection:
        assert connection.stdout is not None
        agent = psutil.Process(int(connection.stdout.readline()))
        [rank] = eventually(agent.children, what="the rank")
        rank.suspend()
        if is_agent_stopped:
            agent.suspend()
        connection.kill()
    try:
        eventually(lambda: _is_gone(rank) and _is_gone(agent), what="the end of both")
    finally:
        for one in (rank, agent):
            if not _is_gone(one):
                one.kill()


def test_a_leader_that_loads_may_be_silent_for_longer() -> None:
    """It imports, or waits for the other ranks, and holds its interpreter meanwhile."""
    with group(fake={"load_s": 2.0}) as worker:
        worker.wait_for(Hello)
        leader = psutil.Process(worker.process.pid)
        eventually(lambda: len(leader.children(recursive=True)) == 2, what="a rank")
        leader.suspend()
        worker.receive_what_is_there(timeout_s=7.0)
        leader.resume()
        worker.wait_for(Ready)


def test_groups_that_are_stopped_as_a_whole_go_on_each_with_its_own_answers() -> None:
    with group() as first, group() as second:
        processes = []
        for worker in (first, second):
            worker.wait_until_ready()
            processes.append(Processes(worker))
            os.killpg(worker.process.pid, signal.SIGSTOP)
        first.receive_what_is_there(timeout_s=7.0)  # longer than a link may be silent
        for worker in (first, second):
            os.killpg(worker.process.pid, signal.SIGCONT)
        keys = [(w, w.dispatch(n, max_tokens=40), n) for w, n in ((first, "a"), (second, "b"))]
        for worker, key, prompt in keys:
            (stream,) = worker.finish(key)
            assert stream.tokens == answer_tokens(encode_text(prompt), 40)
        assert not any(_is_gone(one) for group in processes for one in group.all)


@pytest.mark.parametrize("lost", ["insert", "step"])
def test_a_call_that_does_not_arrive_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = (
        "import runpy\n"
        "from mlxsup.worker.group.followers import Follower\n"
        "send = Follower.send\n"
        "def lossy(self, frame):\n"
        f"    if {msgpack.packb('name') + msgpack.packb(lost)!r} not in frame:\n"
        "        send(self, frame)\n"
        "Follower.send = lossy\n"
        "runpy.run_module('mlxsup.worker', run_name='__main__')\n"
    )
    argv = [sys.executable, "-P", "-c", plant]
    monkeypatch.setattr("support.worker.worker_harness.worker_argv", lambda: argv)
    with group() as worker:
        worker.wait_until_ready()
        worker.dispatch("hello", max_tokens=ENDLESS)
        if lost == "insert":
            assert end_as_the_supervisor_would(worker) == ExitCode.STEP_ERROR
            assert "call 2 must follow, not 3" in worker.log().splitlines()[-1]
        else:  # rank 0 waits in it for ever, and its supervisor ends it
            eventually(lambda: [one.is_behind for one in worker.beat().ranks] == [True])


SILENT = """
import sys
from mlxsup.worker.group.frames import FrameWriter, Greeting, Loaded

leader = FrameWriter(1)
for message in (
    Greeting(address="a:1", versions={}, fingerprint="f"), Loaded(active_bytes=0)
)[:int(sys.argv[1])]:
    leader.write(message)
sys.stdin.read()
"""
"""A rank that says so many messages, and nothing more."""


LEADER = """
import sys
from mlxsup.protocol.launch import GroupHost
from mlxsup.worker.group import followers
from support.worker.turn_bench import make_spec

followers.PULSE_S, followers.LINK_LIMIT_S, followers.LOAD_LIMIT_S = 0.01, 0.05, 60.0
followers.host_argv = lambda host, module: [sys.executable, "-c", *sys.argv[1:]]
group = followers.Followers(make_spec(hosts=(GroupHost(), GroupHost())))
[rank] = group.ranks
while not (True, rank.greeting, rank.loaded)[int(sys.argv[-1])]:
    group.news.wait(0.1)  # it starts
followers.LOAD_LIMIT_S = 0.5
while not rank.unreachable:
    group.news.wait(0.1)
sys.exit(rank.unreachable)
"""


@pytest.mark.parametrize(
    ("said", "limit_s", "code"),
    [(0, 0.5, 1), (1, 0.5, ExitCode.RANK_LOST), (2, 0.05, ExitCode.RANK_LOST)],
)
def test_a_rank_that_loads_may_be_silent_for_longer_than_one_that_serves(
    said: int, limit_s: float, code: int
) -> None:
    """Its imports may hold the interpreter. Before it says what it is, it is unreachable, which the
    group may do without."""
    command = [sys.executable, "-c", LEADER, SILENT, str(said)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    assert f"no sign of life for {limit_s:g} s" in done.stderr.splitlines()[-1]


def test_a_rank_by_ssh_serves_and_names_its_host(fake_ssh: None) -> None:
    with group((GroupHost(), GroupHost(ssh="far", python="logging-python"))) as worker:
        worker.wait_until_ready()
        (stream,) = worker.finish(worker.dispatch("hello", max_tokens=5))
        assert stream.tokens == answer_tokens(encode_text("hello"), 5)
        Processes(worker).follower.kill()
        assert end_as_the_supervisor_would(worker) == ExitCode.RANK_LOST
        cause = worker.log().splitlines()[-1]
        assert cause == "rank 1 (far) was lost with SIGKILL"  # and no line of its routine


@pytest.mark.parametrize(
    ("host", "code", "says"),
    [
        (GroupHost(ssh="nowhere"), ExitCode.RANK_LOST, "rank 1 (nowhere) is unreachable"),
        (
            GroupHost(ssh="far", python="/no/python"),
            ExitCode.BAD_LAUNCH,
            "rank 1 (far) has no mlxsup at /no/python; set python",
        ),
        (
            GroupHost(ssh="far", python="bare-python"),
            ExitCode.BAD_LAUNCH,
            "rank 1 (far) has no mlxsup at bare-python; set python",
        ),
        (
            GroupHost(ssh="far", python="old-python"),
            ExitCode.BAD_LAUNCH,
            "rank 1 (far) has no mlxsup at old-python; set python",
        ),
        (
            GroupHost(ssh="far", python="chatty-python"),
            ExitCode.BAD_LAUNCH,
            "rank 1 (far): its shell prints 'hello'; it must print nothing before a command",
        ),
        (
            GroupHost(ssh="far", python="earlier-python"),
            ExitCode.BAD_LAUNCH,
            "rank 1 (far) has mlxsup 0.0.1, not ",
        ),
        (
            GroupHost(ssh="far", python="foreign-python"),
            ExitCode.BAD_LAUNCH,
            "unknown type 'howdy'; known are beat, error, hello, progress, ready; install the same",
        ),
        (
            GroupHost(ssh="far", python="later-python"),
            ExitCode.BAD_LAUNCH,
            "does not understand rank 0 (unknown type 'who'; known are call, plan, stop, which);"
            " install the same",
        ),
        (
            GroupHost(ssh="far", python="copying-python"),
            ExitCode.BAD_MODEL,
            "rank 1 (far) has other model files than the first host; copy",
        ),
        (GroupHost(address="192.0.2.1"), ExitCode.BAD_LAUNCH, "not 192.0.2.1"),
    ],
)
def test_a_host_that_cannot_take_part(
    host: GroupHost, code: ExitCode, says: str, fake_ssh: None
) -> None:
    with group((GroupHost(), host)) as worker:
        assert end_as_the_supervisor_would(worker) == code
        assert says in " ".join(worker.log().splitlines()[-2:])  # the exit may be logged last


def test_a_share_must_fit_into_the_memory_of_its_host() -> None:
    with group(fake={"active_bytes": 2**60}) as worker:
        assert end_as_the_supervisor_would(worker) == ExitCode.BAD_LAUNCH
        assert re.search(
            r"rank 1 \(127\.0\.0\.1\) has .* free, but its share needs \d", worker.log()
        )


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_group_ends_while_a_follower_hangs_in_its_load(is_killed: bool) -> None:
    """The leader is killed, or its supervisor is gone."""
    with group(fake={"load_stall": "gil"}) as worker:
        eventually(lambda: len(psutil.Process(worker.process.pid).children(True)) == 2)
        processes = Processes(worker)
        if is_killed:
            worker.process.kill()
        else:
            worker.close_pipe()
        worker.exit_code()
        eventually(processes.are_gone, what="the end of all ranks")


def test_hosts_check_says_which_host_cannot_take_part(fake_ssh: None, tmp_path: Path) -> None:
    config = tmp_path / "mlxsup.toml"
    far = 'ssh = "far"\n'
    hosts = [
        "",
        far,
        'ssh = "nowhere"',
        f'{far}python = "/no/python"',
        f'{far}python = "bare-python"',
        f'{far}python = "chatty-python"',
    ]
    config.write_text(
        '[models.m]\nengine = "fake"\n'
        + "".join(f'[[models.m.hosts]]\naddress = "127.0.0.1"\n{host}\n' for host in hosts)
        + '[[models.m.hosts]]\naddress = "192.0.2.1"\n'
    )
    command = ("hosts", "check", "--config", str(config))
    done = run_cli(*command, "--json", PATH=os.environ["PATH"])
    assert done.returncode == 1
    assert not problems(done.stdout, ("hosts", "check"))
    findings = json.loads(done.stdout)["hosts"]
    assert [one["rank"] for one in findings] == [0, 1, 2, 3, 4, 5, 6]
    assert [one["problem"] and one["problem"].partition(":")[0] for one in findings] == [
        None, None, "ssh", "no mlxsup at /no/python; set python of this host",
        "no mlxsup at bare-python; set python of this host",
        "its shell prints 'hello'; it must print nothing before a command",
        "192.0.2.1 is not its address",
    ]  # fmt: skip
    assert "No route to host; `ssh nowhere` must work" in findings[2]["problem"]
    assert findings[1]["available_bytes"] > 0
    assert min(findings[1]["round_trip_s"], findings[1]["bytes_per_s"]) > 0
    planned = run_cli("plan", "--config", str(config), "--json", PATH=os.environ["PATH"])
    assert not problems(planned.stdout, ("plan",))
    (model,) = json.loads(planned.stdout)["models"]
    assert [one["fits"] for one in model["hosts"]] == [True, False, False, False, False, True]


def test_hosts_check_prints_the_tables_of_hosts_that_it_is_given(
    fake_ssh: Path, tmp_path: Path
) -> None:
    config = tmp_path / "mlxsup.toml"
    config.write_text('[models."m.1"]\nengine = "fake"\n')
    command = ("hosts", "check", "m.1", "127.0.0.1", "far=127.0.0.1", "--config", str(config))
    done = run_cli(*command, PATH=os.environ["PATH"])
    assert done.returncode == 0
    check_plain(done.stdout)
    found, _, tables = done.stdout.partition("\n\n")
    assert [line.split()[-1] for line in found.splitlines()] == ["RESULT", "ok", "ok"]
    with config.open("a") as file:
        file.write(tables)
    assert run_cli("config", "check", str(config)).returncode == 0
    again = run_cli("hosts", "check", "m.1", "--config", str(config), PATH=os.environ["PATH"])
    assert again.returncode == 0
    for places in (["far=127.0.0.1"], ["127.0.0.1"], ["far=127.0.0.1", "127.0.0.1"]):
        wrong = run_cli("hosts", "check", "m.1", *places, "--config", str(config))
        assert wrong.returncode == ExitStatus.USAGE
        assert "must be the address of this machine" in wrong.stderr


def test_hosts_check_and_plan_say_that_the_hosts_cannot_divide_the_model(
    fake_ssh: None, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model")
    config = tmp_path / "mlxsup.toml"
    config.write_text(f'[models.m]\npath = "{model}"\n')
    others = [f"far{number}=127.0.0.1" for number in (1, 2)]
    command = ("hosts", "check", "m", "127.0.0.1", *others, "--config", str(config), "--json")
    done = run_cli(*command, PATH=os.environ["PATH"])
    assert done.returncode == 1
    checked = json.loads(done.stdout)
    problems_found = [one["problem"] for one in checked["hosts"]]
    assert problems_found[1:] == [None, None]
    assert "num_attention_heads is 4, which 3 hosts cannot divide; use another" in problems_found[0]
    with config.open("a") as file:
        file.write(checked["tables"])
    planned = run_cli("plan", "--config", str(config), "--json", PATH=os.environ["PATH"])
    plan = json.loads(planned.stdout)
    assert [one["problem"] for one in plan["models"][0]["hosts"]] == problems_found
    assert not plan["fits"]
