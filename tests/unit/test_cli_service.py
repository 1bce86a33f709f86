"""The files of a service, and what they are made of."""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from mlxsup.cli.commands.service import kept_variables, own_program
from mlxsup.cli.commands.start import service_option
from mlxsup.cli.exit_status import PERMANENT_EXITS, CliError, ExitStatus
from mlxsup.cli.service import MARKER, Launchd, Systemd, plist, unit_text
from mlxsup.cli.terminal.output import Output

from support.cli.service_facts import facts, mac_facts


def test_the_files_of_a_service(snapshot: SnapshotAssertion) -> None:
    """A user's unit has nothing that only root may set; `KeepAlive` has one condition alone."""
    assert {
        "unit of a user": unit_text(facts()).splitlines(),
        "unit of the machine": unit_text(facts(is_system=True)).splitlines(),
        "job of a user": plist(mac_facts()),
        "job of the machine": plist(mac_facts(is_system=True)),
    } == snapshot


@pytest.mark.parametrize(("drain_s", "stop_s"), [(30.0, 45), (0.0, 15), (2.1, 18), (600.0, 615)])
def test_the_end_may_take_as_long_as_the_drain_and_the_processes(
    drain_s: float, stop_s: int
) -> None:
    assert f"\nTimeoutStopSec={stop_s}\n" in unit_text(facts(drain_s=drain_s))
    assert plist(facts(drain_s=drain_s))["ExitTimeOut"] == stop_s


def test_a_folder_for_temporary_files_is_private_only_if_nothing_of_ours_is_there() -> None:
    for path in ("runtime_dir", "config", "log_dir"):
        unit = unit_text(facts(is_system=True, **{path: Path("/tmp/mlxsup/x")}))
        assert "PrivateTmp" not in unit


ODD = "/opt/my 100% $HOME & <b>/mlxsup"


def test_signs_in_paths_mean_themselves_and_the_program_is_known_again() -> None:
    text = unit_text(facts(program=Path(ODD), config=Path("/etc/a $b %h.toml")))
    command = ':"/opt/my 100%% $HOME & <b>/mlxsup" {} --config "/etc/a $b %%h.toml"\n'
    assert f"\nExecStart={command.format('start')}" in text
    assert f"\nExecReload={command.format('reload')}" in text
    assert '"PATH=/opt/my 100%% $HOME & <b>:' in text
    assert Systemd.command_in(text) == [ODD, "start", "--config", "/etc/a $b %h.toml"]
    job = Launchd.text(mac_facts(program=Path(ODD)))
    assert plistlib.loads(job.encode()) == plist(mac_facts(program=Path(ODD)))
    assert (Launchd.command_in(job)[0], job.count(MARKER)) == (ODD, 1)


@pytest.mark.parametrize(
    ("manager", "text"),
    [
        (Systemd, unit_text(facts()).replace("ExecStart", "ExecStarts")),
        (Systemd, '[Service]\nExecStart="'),
        *((Launchd, text) for text in ("", "no plist", "<plist/>", "<plist><string>a</string>")),
    ],
)
def test_a_file_that_starts_nothing_has_no_command(
    manager: type[Systemd | Launchd], text: str
) -> None:
    assert manager.command_in(text) == []


@pytest.mark.parametrize("sign", ['"', "\\", "\n", "\t", "\x7f", "\udcff"])
@pytest.mark.parametrize("name", ["program", "config", "runtime_dir", "log_dir"])
def test_a_path_that_no_file_can_express_is_refused(name: str, sign: str) -> None:
    with pytest.raises(CliError, match="cannot write a service file"):
        facts(**{name: Path(f"/a/b{sign}c/mlxsup")}).check()
    facts(**{name: Path("/a/b 'c' é %s $d/mlxsup")}).check()


def test_what_says_where_models_are_is_kept_and_no_secret_is() -> None:
    environment = {"HF_HOME": "/hf", "HF_TOKEN": "secret", "PATH": "/x", "HF_HUB_CACHE": ""}
    assert kept_variables(environment) == (("HF_HOME", "/hf"),)
    older = {"HUGGINGFACE_HUB_CACHE": "/hub"}
    assert kept_variables(older) == tuple(older.items()), "it counts for downloads, too"
    assert 'Environment="HF_HOME=/hf"' in unit_text(facts(variables=kept_variables(environment)))


def test_only_what_another_start_does_not_help_against_is_success_to_launchd(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for status in ExitStatus:

        def fail(output: Output, status: ExitStatus = status) -> None:
            raise CliError("it cannot start", status=status)

        with pytest.raises(CliError):
            service_option(fail)(is_service=False, output=Output())
        if status in PERMANENT_EXITS:
            assert service_option(fail)(is_service=True, output=Output()) == ExitStatus.OK
            assert "error: it cannot start" in capsys.readouterr().err
        else:
            with pytest.raises(CliError):
                service_option(fail)(is_service=True, output=Output())


def test_the_link_that_a_shell_finds_counts_if_it_leads_here(tmp_path: Path) -> None:
    environment, links = tmp_path / "venv", tmp_path / "bin"
    for folder in (environment, links):
        folder.mkdir()
    own, link, other = environment / "mlxsup", links / "mlxsup", tmp_path / "mlxsup"
    interpreter = str(environment / "python")
    assert own_program("mlxsup", interpreter, None) is None
    own.touch()
    other.touch()
    link.symlink_to(own)
    assert own_program(str(own), sys.executable, str(link)) == link
    assert own_program(str(own), sys.executable, str(other)) == own
    assert own_program(str(own), sys.executable, None) == own
    assert own_program("/x/cli/__main__.py", interpreter, str(link)) == link
