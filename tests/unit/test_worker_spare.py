"""A spare worker: its command line, and how it waits for its spec."""

from __future__ import annotations

import os
import queue
import select
import threading
from collections.abc import Callable, Iterator

import pytest

from mlxsup.protocol.launch import SPARE_OPTION, LaunchSpec, spare_argv, worker_argv
from mlxsup.worker.__main__ import main
from mlxsup.worker.bootstrap import LaunchError
from mlxsup.worker.engines.mlx import imports
from mlxsup.worker.parent_watch import ORPHANED_EXIT
from mlxsup.worker.spare import wait_for_spec

from support.launch_specs import SPEC


def test_its_command_is_that_of_a_worker_with_the_pipe_that_it_inherits() -> None:
    assert spare_argv(worker_argv("py"), 9) == [*worker_argv("py"), SPARE_OPTION, "9"]


@pytest.mark.parametrize("arguments", [["--spare"], ["--spare", "x"], ["--spare", "-1"], ["9"]])
def test_other_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 64
    assert "usage" in capsys.readouterr().err


class Spare:
    """A spare worker on this thread, whose imports and whose end are only noted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec_pipe, self.supervisor = os.pipe()
        self.ready, self.ready_pipe = os.pipe()
        self.ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.imports: Callable[[], None] = lambda: None
        monkeypatch.setattr(os, "_exit", self.ended.put)
        monkeypatch.setattr(imports, "import_everything", lambda: self.imports())

    def wait_for_spec(self) -> LaunchSpec:
        return wait_for_spec(self.spec_pipe, self.ready_pipe)

    def is_ready(self) -> bool:
        """Whether its end of the pipe has said or closed something."""
        return bool(select.select([self.ready], [], [], 0)[0])

    def outlived_by_nobody(self) -> None:
        """Its supervisor ends, and it with it."""
        os.close(self.supervisor)
        assert self.ended.get(timeout=10) == ORPHANED_EXIT == 1


@pytest.fixture
def spare(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spare]:
    made = Spare(monkeypatch)
    yield made
    os.close(made.spec_pipe)
    os.close(made.ready)


def test_it_is_ready_when_everything_is_imported(spare: Spare) -> None:
    seen: list[object] = []
    spare.imports = lambda: seen.extend([threading.get_ident(), spare.is_ready()])
    os.write(spare.supervisor, SPEC.to_line())
    assert spare.wait_for_spec() == SPEC
    assert seen == [threading.get_ident(), False], "MLX belongs to the thread that loads"
    assert os.read(spare.ready, 16) == b"\0"
    assert os.read(spare.ready, 16) == b"", "the pipe is still open"
    spare.outlived_by_nobody()


def test_it_is_ready_before_there_is_a_spec(spare: Spare) -> None:
    def send_once_ready() -> None:
        assert select.select([spare.ready], [], [], 10)[0]
        os.write(spare.supervisor, SPEC.to_line())

    supervisor = threading.Thread(target=send_once_ready)
    supervisor.start()
    assert spare.wait_for_spec() == SPEC
    supervisor.join(10)
    spare.outlived_by_nobody()


def test_a_wrong_spec_is_refused_once_it_is_ready(spare: Spare) -> None:
    os.write(spare.supervisor, b"nonsense\n")
    with pytest.raises(LaunchError, match="the launch spec on standard input is wrong"):
        spare.wait_for_spec()
    assert os.read(spare.ready, 16) == b"\0"
    spare.outlived_by_nobody()


def test_what_cannot_be_imported_makes_none_that_is_ready(spare: Spare) -> None:
    def imports() -> None:
        raise ImportError("no MLX")

    spare.imports = imports
    with pytest.raises(ImportError, match="no MLX"):
        spare.wait_for_spec()
    assert not spare.is_ready()
    os.close(spare.ready_pipe)
    spare.outlived_by_nobody()


def test_it_ends_with_its_supervisor_while_it_imports_E6(spare: Spare) -> None:
    def imports() -> None:
        spare.outlived_by_nobody()
        raise ImportError("it is gone by now")

    spare.imports = imports
    with pytest.raises(ImportError, match="gone by now"):
        spare.wait_for_spec()
    os.close(spare.ready_pipe)


def test_the_thread_that_waits_keeps_no_process_alive(spare: Spare) -> None:
    seen: list[bool] = []
    spare.imports = lambda: seen.extend(
        one.daemon for one in threading.enumerate() if one.name == "parent-watch"
    )
    os.write(spare.supervisor, SPEC.to_line())
    spare.wait_for_spec()
    assert seen == [True]
    spare.outlived_by_nobody()


def test_it_lives_whatever_comes_behind_its_spec_E6(spare: Spare) -> None:
    os.write(spare.supervisor, SPEC.to_line())
    assert spare.wait_for_spec() == SPEC
    os.write(spare.supervisor, b"more")
    with pytest.raises(queue.Empty):
        spare.ended.get(timeout=0.05)
    spare.outlived_by_nobody()
