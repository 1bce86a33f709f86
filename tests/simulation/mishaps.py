"""What strikes a played process that serves, as the plan's dice say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .faults import ACCUSING, Fault

if TYPE_CHECKING:
    from .worker import PlayedWorker
    from .world import World


SHORT = 0.5
"""Chance of each step with a request that needs too much memory."""


def lacks_memory(worker: PlayedWorker, world: World) -> bool:
    """Whether a request that needs too much memory ends this step."""
    is_struck = any(row.prompt.is_too_large for row in worker.batch.rows.values())
    if not is_struck or world.plan.random.random() >= SHORT:
        return False
    world.struck("too_large")
    worker.die(75, "one request needs too much")
    return True


def strikes(worker: PlayedWorker, world: World) -> bool:
    """Whether a fault ends this step."""
    happens, dice = world.happens, world.plan.random
    for name, codes in (("fault_71", (71,)), ("gpu_72", (72,)), ("raise_70", (70,)),
                        ("oom_75", (75,)), ("odd_exit", (1, 65, 0))):  # fmt: skip
        if happens(name):
            worker.die(dice.choice(codes), f"{name} at {dice.randrange(10**6)}")
            return True
    for name, signals in (("kill", ("SIGKILL",)), ("term", ("SIGTERM",)), ("segv", ACCUSING)):
        if happens(name):
            worker.exit(signal=dice.choice(signals))
            return True
    for name in ("oom_kill", "oom_near", "oom_beat"):
        if happens(name):
            world.measure(worker, name)
            worker.pulse.beat()
            world.time.after(0.001, lambda: worker.exit(signal="SIGKILL"))
            return True
    if worker.fault is not None:
        return False  # one at a time, so that it is known what a kill is for
    for name in ("stop", "stall", "gil", "blocked"):
        if happens(name):
            worker.hang(name)
            return True
    if happens("link_drops"):
        worker.fault = Fault(name="link_drops", since=world.time.now)
        worker.unlink()
        return True
    if happens("garbage"):
        worker.fault = Fault(name="garbage", since=world.time.now)
        worker.breaks()
        return True
    if happens("row_lost"):
        worker.fault = Fault(name="row_lost", since=world.time.now)
        worker.batch.lose_one()
    elif happens("mute"):
        worker.fault = Fault(name="mute", since=world.time.now)
    return False


def while_idle(worker: PlayedWorker, world: World) -> None:
    """It may die although it has nothing to do."""
    if world.happens("idle_dies"):
        world.time.after(
            world.plan.random.uniform(0.0, 6.0),
            lambda: worker.exit(signal="SIGKILL", fault="idle_dies"),
        )
