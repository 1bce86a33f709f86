"""packaging/homebrew: its service starts what the command line has, as the job of launchd does."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from mlxsup.cli.main import root
from mlxsup.cli.service.launchd import plist
from mlxsup.protocol.version import VERSION

from support.cli.service_facts import mac_facts

FORMULA = Path(__file__).parents[2] / "packaging" / "homebrew" / "mlxsup.rb"
TEXT = FORMULA.read_text()


def test_the_service_is_the_job_that_service_install_writes() -> None:
    [run] = re.findall(r"^    run \[opt_bin/(.*)\]$", TEXT, re.MULTILINE)
    words = re.findall(r'"([^"]*)"', run)
    job = plist(mac_facts())
    assert words[1:] == job["ProgramArguments"][1:3]
    assert words[0] == Path(job["ProgramArguments"][0]).name
    assert re.findall(r"^    keep_alive (.*)$", TEXT, re.MULTILINE) == ["successful_exit: false"]
    [kind] = re.findall(r"^    process_type :(.*)$", TEXT, re.MULTILINE)
    assert kind == job["ProcessType"].lower()


def test_the_commands_that_it_runs_exist() -> None:
    context = click.Context(root)
    start, completion = (root.get_command(context, name) for name in ("start", "completion"))
    assert start is not None
    assert completion is not None
    assert "--service" in {word for parameter in start.params for word in parameter.opts}
    [shells] = re.findall(r"shells: \[(.*)\]", TEXT)
    [choice] = [one.type for one in completion.params if isinstance(one.type, click.Choice)]
    assert set(shells.replace(":", "").split(", ")) <= set(choice.choices)


def test_it_is_of_this_version_and_says_what_a_release_fills_in() -> None:
    marked = [line for line in TEXT.splitlines() if line.endswith("# RELEASE")]
    assert [line.split()[0] for line in marked] == ["homepage", "url", "sha256"]
    assert f"mlxsup-{VERSION}.tar.gz" in TEXT


@pytest.mark.skipif(shutil.which("ruby") is None, reason="needs ruby")
def test_ruby_can_read_it() -> None:
    done = subprocess.run(["ruby", "-c", str(FORMULA)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
