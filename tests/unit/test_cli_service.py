"""The files of a service."""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path

import pytest

from mlxsup.cli.commands.service import kept_variables, own_program
from mlxsup.cli.commands.start import service_option
from mlxsup.cli.exit_status import CliError, ExitStatus
from mlxsup.cli.service import launchd, systemd
from mlxsup.cli.service.facts import MARKER, PERMANENT_EXITS, UnusableFactError
from mlxsup.cli.terminal.output import Output

from support.cli.service_facts import facts, mac_facts


def keys(unit: str) -> dict[str, list[str]]:
    """The lines of a unit by key."""
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


# ---------------------------------------------------------------- systemd


def test_a_users_unit_says_how_the_daemon_lives_and_nothing_that_users_may_not_set() -> None:
    unit = keys(systemd.unit_text(facts()))
    assert unit["Type"] == ["notify"]
    assert unit["NotifyAccess"] == ["main"]
    assert unit["WatchdogSec"] == ["10"]
    assert unit["Restart"] == ["on-failure"]
    assert unit["KillMode"] == ["mixed"]
    assert unit["OOMPolicy"] == ["continue"]
    assert unit["WantedBy"] == ["default.target"]
    assert not {"User", "ProtectSystem", "SystemCallFilter", "After"} & set(unit)


def test_what_another_start_does_not_help_against_is_not_started_again() -> None:
    [codes] = keys(systemd.unit_text(facts()))["RestartPreventExitStatus"]
    assert tuple(map(int, codes.split())) == PERMANENT_EXITS
    assert codes == "64 73 75 78"


def test_a_daemon_that_ends_at_once_each_time_is_given_up() -> None:
    before, _, after = systemd.unit_text(facts()).partition("[Service]\n")
    unit, service = keys(before), keys(after)
    [window], [burst] = unit["StartLimitIntervalSec"], unit["StartLimitBurst"]
    [pause] = service["RestartSec"]
    a_start_s = 60  # with many models and a slow disk
    assert int(window) > int(burst) * (int(pause) + a_start_s)


@pytest.mark.parametrize("is_service", [False, True])
@pytest.mark.parametrize("status", [*PERMANENT_EXITS, ExitStatus.FAILED, ExitStatus.NO_DAEMON])
def test_only_what_another_start_does_not_help_against_is_success_to_launchd(
    is_service: bool, status: ExitStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(output: Output) -> None:
        raise CliError("it cannot start", status=ExitStatus(status))

    start = service_option(fail)
    if is_service and status in PERMANENT_EXITS:
        assert start(is_service=True, output=Output()) == ExitStatus.OK
        assert "error: it cannot start" in capsys.readouterr().err
    else:
        with pytest.raises(CliError):
            start(is_service=is_service, output=Output())


@pytest.mark.parametrize(("drain_s", "stop_s"), [(30.0, 45), (0.0, 15), (2.1, 18), (600.0, 615)])
def test_the_end_may_take_as_long_as_the_drain_and_the_processes(
    drain_s: float, stop_s: int
) -> None:
    assert keys(systemd.unit_text(facts(drain_s=drain_s)))["TimeoutStopSec"] == [str(stop_s)]
    assert launchd.plist(facts(drain_s=drain_s))["ExitTimeOut"] == stop_s


def test_a_unit_of_the_machine_writes_only_where_the_daemon_does() -> None:
    unit = keys(systemd.unit_text(facts(is_system=True)))
    assert unit["User"] == ["alice"]
    assert unit["WantedBy"] == ["multi-user.target"]
    assert unit["CapabilityBoundingSet"] == [""]
    assert unit["ReadWritePaths"] == [
        '"-/home/alice/.cache/huggingface/hub"',
        '"-/home/alice/.mlxsup"',
    ]
    assert unit["PrivateTmp"] == ["yes"]
    assert not {"PrivateDevices", "MemoryDenyWriteExecute", "MemoryMax"} & set(unit)


def test_a_folder_for_temporary_files_is_private_only_if_nothing_of_ours_is_there() -> None:
    for path in ("runtime_dir", "config", "log_dir"):
        unit = systemd.unit_text(facts(is_system=True, **{path: Path("/tmp/mlxsup/x")}))
        assert "PrivateTmp" not in unit


def test_spaces_percent_and_dollar_signs_mean_themselves() -> None:
    odd = facts(program=Path("/opt/my 100% $HOME/mlxsup"), config=Path("/etc/a $b %h.toml"))
    unit = keys(systemd.unit_text(odd))
    command = ':"/opt/my 100%% $HOME/mlxsup" {} --config "/etc/a $b %%h.toml"'
    assert unit["ExecStart"] == [command.format("start")]
    assert unit["ExecReload"] == [command.format("reload")]
    assert '"PATH=/opt/my 100%% $HOME:' in systemd.unit_text(odd)
    assert systemd.Systemd.program_in(systemd.unit_text(odd)) == "/opt/my 100% $HOME/mlxsup"


def test_the_program_of_a_unit_is_known_only_if_we_have_written_it() -> None:
    text = systemd.unit_text(facts())
    assert systemd.Systemd.program_in(text) == "/home/alice/.local/bin/mlxsup"
    assert systemd.Systemd.program_in(text.replace(MARKER, "")) is None
    assert systemd.Systemd.program_in(text.replace("ExecStart", "ExecStarts")) is None


# ---------------------------------------------------------------- launchd


@pytest.mark.parametrize("is_system", [False, True])
def test_a_job_survives_its_file(is_system: bool) -> None:
    odd = mac_facts(is_system=is_system, program=Path("/opt/a & <b> %h $c/mlxsup"))
    text = launchd.Launchd.text(odd)
    assert plistlib.loads(text.encode()) == launchd.plist(odd)
    assert launchd.Launchd.program_in(text) == "/opt/a & <b> %h $c/mlxsup"
    assert launchd.read_job(text)["StandardErrorPath"] == "/Users/alice/.mlxsup/logs/service.out"
    assert text.count(MARKER) == 1


def test_a_job_is_started_again_by_one_condition_alone() -> None:
    job = launchd.plist(mac_facts())
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["ProgramArguments"] == [
        "/Users/alice/.local/bin/mlxsup", "start", "--service",
        "--config", "/Users/alice/.config/mlxsup/config.toml",
    ]  # fmt: skip
    assert job["ProcessType"] == "Interactive"
    assert "AbandonProcessGroup" not in job
    assert "UserName" not in job
    assert launchd.plist(mac_facts(is_system=True))["UserName"] == "alice"


@pytest.mark.parametrize("text", ["", "no plist", "<plist/>", "<plist><string>a</string></plist>"])
def test_another_file_is_no_job_of_ours(text: str) -> None:
    assert launchd.Launchd.program_in(text) is None
    assert launchd.read_job(text) == {}


# ---------------------------------------------------------------- facts


def test_what_says_where_models_are_is_kept_and_no_secret_is() -> None:
    environment = {"HF_HOME": "/hf", "HF_TOKEN": "secret", "PATH": "/x", "HF_HUB_CACHE": ""}
    assert kept_variables(environment) == (("HF_HOME", "/hf"),)
    older = {"HUGGINGFACE_HUB_CACHE": "/hub"}
    assert kept_variables(older) == tuple(older.items()), "it counts for downloads, too"
    text = systemd.unit_text(facts(variables=kept_variables(environment)))
    assert 'Environment="HF_HOME=/hf"' in text
    assert "secret" not in text


@pytest.mark.parametrize("sign", ['"', "\\", "\n", "\t", "\x7f", "\udcff"])
@pytest.mark.parametrize("name", ["program", "config", "runtime_dir", "log_dir"])
def test_a_path_that_no_file_can_express_is_refused(name: str, sign: str) -> None:
    with pytest.raises(UnusableFactError):
        facts(**{name: Path(f"/a/b{sign}c/mlxsup")}).check()
    facts(**{name: Path("/a/b 'c' é %s $d/mlxsup")}).check()


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
