"""The command line of a spare worker."""

from __future__ import annotations

import pytest

from mlxsup.protocol.launch import SPARE_OPTION, spare_argv, worker_argv
from mlxsup.worker.__main__ import main


def test_its_command_is_that_of_a_worker_with_the_pipe_that_it_inherits() -> None:
    assert spare_argv(worker_argv("py"), 9) == [*worker_argv("py"), SPARE_OPTION, "9"]


@pytest.mark.parametrize("arguments", [["--spare"], ["--spare", "x"], ["--spare", "-1"], ["9"]])
def test_other_arguments_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 64
    assert "usage" in capsys.readouterr().err
