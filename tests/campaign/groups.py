"""Strike and restart models over two hosts, the second one by ssh, and count what is left."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import psutil

from mlxsup.client import Client

from .oracle import must_be_whole
from .scenario import FAKE, Figure, Place, Scenario, Values, at_most, count
from .watch import SOON, ExitWatch, main_process
from support.client.streams import Reader
from support.daemon.daemon import Daemon, fake, row, wait_for_state
from support.daemon.faults import undisturbed
from support.eventually import eventually
from support.worker.fake_ssh import FakeSsh

HOSTS = [{"address": "127.0.0.1"}, {"address": "127.0.0.1", "ssh": "far"}]
MEMBERS = ("leader", "ssh", "agent", "follower")
LIMIT_S = 600.0
"""One load at a time, and many daemons, on a machine with two cores."""


def members_of(client: Client, model: str) -> dict[str, psutil.Process]:
    """Return the processes of a group as soon as all of them run, the worker first."""

    def find() -> dict[str, psutil.Process] | None:
        pid = row(client, model)["pid"]
        found = [psutil.Process(pid)] if pid else []
        while found and (below := found[-1].children()):
            found += below
        is_whole = len(found) == len(MEMBERS) and "group.follower" in " ".join(found[-1].cmdline())
        return dict(zip(MEMBERS, found, strict=True)) if is_whole else None

    def find_again() -> dict[str, psutil.Process] | None:
        try:
            return find()
        except psutil.NoSuchProcess:
            return None

    return eventually(find_again, timeout_s=LIMIT_S, what=f"all processes of {model}")


def begin_another_life(client: Client, model: str, generation: int) -> None:
    """Wait until a model is READY in a later life."""
    eventually(lambda: row(client, model)["generation"] > generation, LIMIT_S, "another life")
    wait_for_state(client, model, "READY", LIMIT_S)


class GroupDaemon(Daemon):
    """A daemon with models over two hosts.

    Attributes:
        temporary: the folder of temporary files of all its processes.

    Args:
        models: how many, `m0` and so on.
        options: of each of their entries.
    """

    def __init__(self, models: int = 1, **options: Any) -> None:
        super().__init__(
            {f"m{n}": fake(hosts=HOSTS, restart=SOON, **options) for n in range(models)}
        )
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir()
        self._ssh = FakeSsh(self.folder)

    def start(self, *, environment: Mapping[str, str] | None = None) -> None:
        """Start it where every host is this machine."""
        own = {"PATH": self._ssh.path, "TMPDIR": str(self.temporary)}
        super().start(environment={**own, **(environment or {})})


# ---------------------------------------------------------------- restarts

WAYS = (*MEMBERS, "restart", "unload")


def restart_again(client: Client, model: str, way: str) -> None:
    """Have a group start anew."""
    before = wait_for_state(client, model, "READY", LIMIT_S)["generation"]
    if way == "restart":
        client.restart(model)
    elif way == "unload":
        client.unload(model)
        client.load(model)
    else:
        members_of(client, model)[way].kill()
        begin_another_life(client, model, before)


def held(daemon: GroupDaemon, client: Client) -> dict[str, Any]:
    """Return what a daemon and its groups hold when nothing happens."""
    main, runtime = main_process(daemon), daemon.folder / "run"
    # A worker may be READY before its heartbeats have a connection, and their socket is gone.
    eventually(lambda: not list(runtime.glob("w*.sock*")), what="every worker being connected")
    groups = [members_of(client, one["name"]) for one in client.status()["models"]]
    every = {"supervisor": [main]} | {who: [one[who] for one in groups] for who in MEMBERS}
    below = main.children(recursive=True)
    return {
        # Now and then a process reads a file, or its library opens one: the least of three looks.
        **{f"files of {who}": [min(one.num_fds() for _ in range(3)) for one in all_of]
           for who, all_of in every.items()},
        **{f"threads of {who}": [one.num_threads() for one in all_of]
           for who, all_of in every.items()},
        "processes": len(below),
        "zombies": sum(one.status() == psutil.STATUS_ZOMBIE for one in below),
        "temporary files": sorted(str(file) for file in daemon.temporary.rglob("*")),
        "sockets": len(list(runtime.rglob("*"))),
    }  # fmt: skip


def restart_groups(models: int, turns: int) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return what a daemon held before and after so many restarts of each of its models, and its
    RSS more, in MB."""
    with GroupDaemon(models) as daemon, daemon.client() as client:

        def take_turns(model: str, turns: int) -> None:
            for number in range(turns):
                restart_again(client, model, WAYS[number % len(WAYS)])

        def take_all_turns(turns: int) -> None:
            with ThreadPoolExecutor(models) as threads:
                names = [f"m{number}" for number in range(models)]
                list(threads.map(take_turns, names, [turns] * len(names)))

        take_all_turns(len(WAYS))
        before, rss = held(daemon, client), main_process(daemon).memory_info().rss
        take_all_turns(turns)
        grown_mb = (main_process(daemon).memory_info().rss - rss) / 1e6
        return before, held(daemon, client), grown_mb


def restart_all(place: Place) -> Values:
    """Restart groups in every way, several at once; nothing may be held that was not before."""
    daemons, models = place.size(2, small=1), place.size(4, small=2)  # each loads one at a time
    turns = place.size(125, small=1)
    with ThreadPoolExecutor(daemons) as threads:
        tries = [threads.submit(restart_groups, models, turns) for _ in range(daemons)]
        found = [one.result() for one in tries]
    changed = [
        f"{name}: {before[name]}, then {after[name]}"
        for before, after, _ in found
        for name in before
        if before[name] != after[name]
    ]
    assert not changed, changed
    return {
        "restarts": daemons * models * turns,
        "changed": len(changed),
        "zombies": sum(after["zombies"] for _, after, _ in found),
        "rss": max(grown for *_, grown in found),
    }


RESTARTS = Scenario("group-restarts", "groups", FAKE, 1, restart_all, (
    count("restarts", "restarts of groups of two hosts: SIGKILL to each of their processes,"
          " `restart`, unload and load", None),
    count("changed", "the same: open files, threads, temporary files or sockets more or fewer, of"
          " the daemon or of a process of a group"),
    count("zombies", "the same: zombies"),
    Figure("rss", "the same: supervisor RSS more", "MB", at_most(5.0)),
))  # fmt: skip
# ---------------------------------------------------------------- strikes

WINDOWS = ("load", "prefill", "decode", "idle", "stop")
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
LOAD_S = 2.0
TOKENS = 60
AT_ONCE = 10


@dataclass(frozen=True, slots=True)
class Struck:
    """The outcome of one strike.

    Attributes:
        key: of its figure.
        gone_s: from the strike until the last process of the group has ended.
        late_s: from then until the next life was READY, without the time of the first load; None
            where that is not known.
    """

    key: str
    gone_s: float
    late_s: float | None


def strike(window: str, whom: str, how: str, seed: float) -> Struck | None:
    """Strike one process of a group in a window; an answer must be that of an undisturbed one.

    Returns:
        None if the process had ended before the strike.
    """
    dice = random.Random(seed)
    options = {"load_s": LOAD_S, "step_s": 0.02, "prefill_tokens_per_step": 1}
    with GroupDaemon(fake=options) as daemon, daemon.client() as client:
        began = time.monotonic()
        members = members_of(client, "m0")
        prompt = "na " * 200 if window == "prefill" else "na"
        reader = stopping = None
        if window == "load":
            time.sleep(dice.uniform(0.0, LOAD_S))  # any moment of a load is struck
            load_s = 0.0
        else:
            wait_for_state(client, "m0", "READY", LIMIT_S)
            load_s = time.monotonic() - began
        if window in ("load", "prefill", "decode"):
            reader = Reader(client, "m0", prompt, max_tokens=TOKENS)
        if window == "prefill":
            eventually(lambda: row(client, "m0")["steps"] > 2, what="a step")
        if window == "decode":
            assert reader is not None
            reader.started()
        if window == "stop":
            stopping = threading.Thread(target=client.unload, args=("m0",))
            stopping.start()
            time.sleep(dice.uniform(0.0, 0.02))  # and any of a stop
        struck_at, gone_s = time.monotonic(), None
        try:
            watches = [ExitWatch(one.pid) for one in members.values()]
            members[whom].send_signal(SIGNALS[how])
        except (psutil.NoSuchProcess, ProcessLookupError):
            assert window == "stop"
        else:
            ends = [one.ended_at(f"{whom} {how} in {window}", LIMIT_S) for one in watches]
            gone_s = max(ends) - struck_at
        late_s = None
        if stopping is not None:
            stopping.join()
            client.load("m0")
        else:
            begin_another_life(client, "m0", 1)
            if load_s and gone_s is not None:
                late_s = time.monotonic() - struck_at - gone_s - load_s
        reader = reader or Reader(client, "m0", prompt, max_tokens=TOKENS)
        must_be_whole(reader, undisturbed(prompt, TOKENS), LIMIT_S)
    place = "load" if window == "load" else "else"
    return None if gone_s is None else Struck(f"{how} {place}", gone_s, late_s)


def strike_all(place: Place) -> Values:
    """Strike every process of a group in every window, many groups at once."""
    cells = list(
        product(WINDOWS[:: place.size(1, small=2)], MEMBERS[:: place.size(1, small=3)], SIGNALS)
    )
    with ThreadPoolExecutor(AT_ONCE) as threads:
        tries = [threads.submit(strike, *cell, random.random()) for cell in cells]
        found = [one.result() for one in tries]
    values: dict[str, list[float]] = {"struck": [len(cells) - found.count(None)]}
    for one in filter(None, found):
        values.setdefault(one.key, []).append(one.gone_s)
        if one.late_s is not None:
            values.setdefault("late", []).append(one.late_s)
    return values


BOUNDS_S = {"killed load": 0.5, "killed else": 0.5, "stopped load": 21.0, "stopped else": 6.0}
GONE = "until its last process has ended"
STRIKES = Scenario("group-strikes", "groups", FAKE, 20, strike_all, (
    count("struck", "strikes to leader, ssh, agent and follower of two hosts, in loads, prompts,"
          " answers, idle and in stops, after each of which an answer has every token", None),
    *(Figure(key, f"the same: {key}, {GONE}", bound=at_most(limit))
      for key, limit in BOUNDS_S.items()),
    Figure("late", "the same: from then until READY, more than the first load", bound=at_most(3.0)),
))  # fmt: skip

GROUPS = (RESTARTS, STRIKES)
