"""The processor time of the threads of another process, in nanoseconds, as the kernel counts it."""

from __future__ import annotations

from pathlib import Path

from support.verdict import NotShown


def thread_ns(pid: int, thread: int | None = None) -> int:
    """That of one thread of a process: the first one, unless another is named.

    Raises:
        NotShown: this system does not tell.
    """
    try:
        times = Path(f"/proc/{pid}/task/{thread or pid}/schedstat").read_text()
    except FileNotFoundError:
        raise NotShown("the processor time of a thread is read from /proc, as on Linux") from None
    return int(times.split()[0])


def threads_ns(pid: int) -> dict[int, int]:
    """That of every thread that a process has, by its number; the first one's is the pid.

    Raises:
        NotShown: this system does not tell.
    """
    folder = Path(f"/proc/{pid}/task")
    threads = [int(one.name) for one in folder.iterdir()] if folder.exists() else [pid]
    return {thread: thread_ns(pid, thread) for thread in threads}
