"""`pull`, `rm` and `run`, with a hub on this machine."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli.downloading import progress_printer
from mlxsup.cli.terminal.output import LiveLine, Output
from mlxsup.client import Client
from mlxsup.protocol.download import DownloadProgress, Repository

from support.cli.cli import ESCAPE, PROMPT, Terminal, command, environment, on_terminal, run_cli
from support.daemon.daemon import fake, toml_of
from support.daemon.downloading_daemon import TOKEN, DownloadingDaemon
from support.daemon.downloads import (
    FILES,
    MIB,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    WEIGHTS,
    WEIGHTS_NAME,
    contents,
    disk_full_at,
    hub_environment,
    parts,
    repo_folder,
    runs_first,
    snapshot,
)
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually
from support.models.tiny_model import make_tiny_model

HELD_AT = 2 * MIB
LIMIT_S = 120.0

NARROW = 40
"""The columns of a terminal in which every line must be folded."""


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        hub.add(OTHER, FILES)
        yield hub


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder, which is the current one, too."""
    # Not pytest's folder, whose path is too long for sockets.
    folder = Path(tempfile.mkdtemp(prefix="mlxsup-h-", dir="/tmp"))
    monkeypatch.chdir(folder)
    yield folder
    shutil.rmtree(folder)


def variables(hub: LocalHub, home: Path, **others: str) -> dict[str, str]:
    """What a command gets in its environment."""
    return hub_environment(hub, home, **{"HOME": str(home), "HF_TOKEN": TOKEN, **others})


def mlxsup(
    hub: LocalHub, home: Path, *arguments: str, stdin: str = "", **others: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in pipes; it shows no token, no escape byte and no traceback."""
    done = run_cli(*arguments, stdin=stdin, **variables(hub, home, **others))
    assert TOKEN not in done.stdout + done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


# ---------------------------------------------------------------- pull


def test_pull_prints_the_folder_and_a_line_for_each_tenth(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "pull", REPO)
    assert (done.returncode, done.stdout) == (0, f"{snapshot(home)}\n")
    assert contents(snapshot(home)) == NEEDED
    *lines, last = done.stderr.splitlines()
    assert lines[0] == f"{REPO}: 0% of 4.1 MiB"
    assert len(lines) <= 11
    assert last == f"{REPO} is complete (4.1 MiB, 4.1 MiB downloaded)"
    again = mlxsup(hub, home, "pull", REPO)
    assert again.stderr.splitlines()[-1].endswith("nothing was missing)")
    assert hub.fetched(WEIGHTS_NAME) == [0]


def test_off_a_terminal_there_is_a_line_for_each_tenth_and_each_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = Output()
    with LiveLine(output) as line:
        show = progress_printer(Repository(REPO, "main"), line, output)
        show(DownloadProgress(is_waiting=True))
        for done in range(1001):
            show(DownloadProgress(done_bytes=done, total_bytes=1000))
    waiting, *lines = capsys.readouterr().err.splitlines()
    assert waiting == f"{REPO}: another process is downloading it: waiting"
    assert lines == [f"{REPO}: {tenth}0% of 1000 B".replace(" 00%", " 0%") for tenth in range(11)]


def test_pull_says_it_in_json(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "pull", REPO, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "schema_version": 1,
        "repo": REPO,
        "revision": "main",
        "folder": str(snapshot(home)),
        "total_bytes": NEEDED_BYTES,
        "fetched_bytes": NEEDED_BYTES,
    }


def test_pull_shows_one_line_on_a_terminal_that_is_gone_at_the_end(
    hub: LocalHub, home: Path
) -> None:
    text = on_terminal(["pull", REPO], **variables(hub, home, COLUMNS=str(NARROW)))
    *shown, last = ESCAPE.sub("", text).split("\r")
    assert any(f"{REPO}: 0% of 4.1 MiB"[: NARROW - 1] in line for line in shown)
    assert all(len(line.strip()) < NARROW for line in shown if "% of" in line)
    assert "% of" not in last


def test_an_interrupted_pull_keeps_what_has_arrived(hub: LocalHub, home: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    process = subprocess.Popen(
        command("pull", REPO),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables(hub, home)),
    )
    eventually(hub.held.is_set)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert f"files that have arrived are kept: `mlxsup pull {REPO}` continues" in said
    hub.release.set()
    done = mlxsup(hub, home, "pull", REPO, "--json")
    assert json.loads(done.stdout)["total_bytes"] == NEEDED_BYTES
    assert hub.fetched(WEIGHTS_NAME) == [0, 0]
    assert parts(home) == [], "of the first"


@pytest.mark.parametrize(
    ("repo", "status", "says"),
    [
        ("../../etc", 64, "hint: a repository is OWNER/NAME"),
        ("org/tiny-modle", 1, f"hint: did you mean {REPO}?"),
        ("org/..", 64, "is not a repository"),
    ],
)
def test_a_wrong_repository_is_refused_with_the_next_step(
    hub: LocalHub, home: Path, repo: str, status: int, says: str
) -> None:
    done = mlxsup(hub, home, "pull", repo)
    assert done.returncode == status
    assert done.stdout == ""
    assert says in done.stderr
    as_json = json.loads(mlxsup(hub, home, "pull", repo, "--json").stdout)
    assert as_json["error"]["code"] == ("usage" if status == 64 else "not_found")


def test_a_gated_repository_names_the_page(hub: LocalHub, home: Path) -> None:
    fault = Fault(status=403, headers={"X-Error-Code": "GatedRepo"})
    hub.break_("revision/main", fault)
    done = mlxsup(hub, home, "pull", REPO)
    assert done.returncode == 1
    assert f"hint: accept its terms at {hub.endpoint}/{REPO}" in done.stderr


def test_a_hub_that_is_away_is_continued_by_the_same_command(hub: LocalHub, home: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(cut_at=HELD_AT, times=100))
    done = mlxsup(hub, home, "pull", REPO)
    assert done.returncode == 1
    hint = done.stderr.splitlines()[-1]
    assert hint == f"hint: files that have arrived are kept; `mlxsup pull {REPO}` continues"
    hub.heal()
    assert mlxsup(hub, home, "pull", REPO).returncode == 0
    assert contents(snapshot(home)) == NEEDED


def test_data_that_is_damaged_each_time_is_not_to_be_fetched_again(
    hub: LocalHub, home: Path
) -> None:
    hub.damage(REPO, WEIGHTS_NAME)
    done = mlxsup(hub, home, "pull", REPO)
    assert done.returncode == 1
    assert "hint: the hub's data is damaged" in done.stderr
    assert "again" not in done.stderr
    assert "continues" not in done.stderr


def test_a_disk_that_is_full_at_90_percent_is_continued_by_the_same_command(
    hub: LocalHub, home: Path
) -> None:
    full_at = len(WEIGHTS) * 9 // 10
    done = mlxsup(hub, home, "pull", REPO, PYTHONPATH=runs_first(disk_full_at(full_at), home))
    assert (done.returncode, done.stdout) == (1, "")
    *_, error, hint = done.stderr.splitlines()
    assert error == f"error: the disk is full: {REPO} is not complete"
    assert hint == (
        f"hint: free some space, or set HF_HOME to a folder on another disk than {home}/hf;"
        f" files that have arrived are kept; `mlxsup pull {REPO}` continues"
    )
    assert parts(home) == [], "it makes room"
    assert mlxsup(hub, home, "pull", REPO).returncode == 0
    assert contents(snapshot(home)) == NEEDED


def test_pull_offline_of_what_is_complete_succeeds(hub: LocalHub, home: Path) -> None:
    mlxsup(hub, home, "pull", REPO)
    done = mlxsup(hub, home, "pull", REPO, HF_HUB_OFFLINE="1")
    assert (done.returncode, done.stdout) == (0, f"{snapshot(home)}\n")
    assert done.stderr == f"{REPO} is complete (4.1 MiB, nothing was missing)\n"


def test_show_names_the_licence_of_what_was_pulled(hub: LocalHub, home: Path) -> None:
    mlxsup(hub, home, "pull", REPO)
    shown = mlxsup(hub, home, "show", REPO, "--json")
    assert json.loads(shown.stdout)["licence"] == "apache-2.0"


# ---------------------------------------------------------------- rm


def test_rm_removes_what_pull_has_fetched_if_it_is_sure(hub: LocalHub, home: Path) -> None:
    mlxsup(hub, home, "pull", REPO)
    unsure = mlxsup(hub, home, "rm", REPO)
    assert unsure.returncode == 64
    assert "hint: add --yes" in unsure.stderr
    assert contents(snapshot(home)) == NEEDED
    done = mlxsup(hub, home, "rm", REPO, "--yes")
    assert (done.returncode, done.stdout) == (0, f"{REPO} is removed, 4.1 MiB are free\n")
    assert not repo_folder(home).exists()
    missing = mlxsup(hub, home, "rm", REPO, "--yes")
    assert missing.returncode == 1
    assert f"{REPO} is not in {home}/hf/hub" in missing.stderr


def test_rm_leaves_a_link_alone(hub: LocalHub, home: Path) -> None:
    mlxsup(hub, home, "pull", REPO)
    elsewhere = home / "elsewhere"
    repo_folder(home).rename(elsewhere)
    repo_folder(home).symlink_to(elsewhere)
    done = mlxsup(hub, home, "rm", REPO, "--yes", "--json")
    assert done.returncode == 1
    error = json.loads(done.stdout)["error"]
    assert (error["code"], str(elsewhere) in error["message"]) == ("is_link", True)
    assert elsewhere.is_dir()


@pytest.mark.parametrize(("answer", "is_kept"), [("n\r", True), ("\r", True), ("y\r", False)])
def test_rm_asks_on_a_terminal(hub: LocalHub, home: Path, answer: str, is_kept: bool) -> None:
    mlxsup(hub, home, "pull", REPO)
    with Terminal("rm", REPO, **variables(hub, home)) as terminal:
        terminal.expect(f"remove {REPO} (4.1 MiB) from")
        terminal.type(answer)
        terminal.end()
        assert terminal.process.returncode == (1 if is_kept else 0)
    assert repo_folder(home).exists() == is_kept


def test_rm_is_refused_while_it_is_downloaded(hub: LocalHub, home: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    process = subprocess.Popen(
        command("pull", REPO),
        stderr=subprocess.DEVNULL,
        env=environment(**variables(hub, home)),
    )
    try:
        eventually(hub.held.is_set)
        done = mlxsup(hub, home, "rm", REPO, "--yes")
        assert done.returncode == 1
        assert f"{REPO} is being downloaded" in done.stderr
        assert len(parts(home)) == 1
    finally:
        process.kill()
        process.wait()


def test_rm_is_refused_while_a_daemon_uses_it(hub: LocalHub) -> None:
    with DownloadingDaemon(hub, {"m": fake(repo=REPO)}) as daemon, daemon.client() as client:
        home, config = daemon.folder, ["--config", str(daemon.config)]
        client.load("m")
        done = mlxsup(hub, home, "rm", REPO, "--yes", *config)
        assert done.returncode == 1
        assert f"{REPO} is in use by m" in done.stderr
        assert "`mlxsup unload m" in done.stderr
        assert contents(snapshot(home)) == NEEDED
        client.unload("m")
        assert mlxsup(hub, home, "rm", REPO, "--yes", *config).returncode == 0
        assert not repo_folder(home).exists()
        # What is gone is downloaded again once the configuration was read again.
        assert daemon.run("reload").returncode == 0
        client.load("m")
        assert contents(snapshot(home)) == NEEDED


OTHER = "org/other"


def write_config(home: Path, name: str = "mlxsup.toml", **more: Any) -> Path:
    """A configuration whose daemon is not at the default place, and has the model `m`."""
    places = {"runtime_dir": f"{home}/other", "log_dir": f"{home}/logs"}
    model = fake(repo=REPO, preload=False, aliases=["em"], **more)
    path = home / name
    path.write_text(toml_of({"supervisor": places, "models.m": model}))
    return path


def status_at(endpoint: str) -> dict[str, Any]:
    with Client(endpoint) as client:
        return client.status()


SHORT = {"max_position_embeddings": 64}
"""A model without sense ends its answer only where its context does."""


@pytest.mark.mlx
def test_run_goes_from_nothing_to_an_answer(home: Path, tmp_path: Path) -> None:
    with local_hub() as hub:
        hub.add(REPO, contents(make_tiny_model(tmp_path / "m", seed=3, config=SHORT)))
        try:
            done = mlxsup(hub, home, "run", REPO, "--json", stdin="tell me\n")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["model"] == "tiny-model"
            assert hub.fetched(WEIGHTS_NAME) == [0]
            with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                assert [one["repo"] for one in client.status()["models"]] == [REPO]
                generation = client.status()["models"][0]["generation"]
            again = mlxsup(hub, home, "run", REPO, "--json", stdin="more\n")
            assert again.returncode == 0, again.stderr
            other = mlxsup(hub, home, "run", OTHER)
            assert other.returncode == 1
            assert "does not serve org/other; it serves tiny-model" in other.stderr
            assert "hint: `mlxsup stop`, then `mlxsup run org/other`; it was" in other.stderr
            with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                assert client.status()["models"][0]["generation"] == generation
        finally:
            assert mlxsup(hub, home, "stop").returncode == 0


@pytest.mark.mlx
def test_run_on_a_terminal_asks_answers_and_leaves(home: Path, tmp_path: Path) -> None:
    with local_hub() as hub:
        hub.add(REPO, contents(make_tiny_model(tmp_path / "m", seed=3, config=SHORT)))
        try:
            with Terminal("run", REPO, **variables(hub, home)) as terminal:
                terminal.expect(PROMPT)
                terminal.type("tell me\r")
                terminal.expect(PROMPT)
                with Client(f"ipc://{home}/.mlxsup/run/client.sock") as client:
                    [served] = client.status()["models"]
                assert (served["state"], served["name"]) == ("READY", "tiny-model")
                terminal.type("/exit\r")
                said = ESCAPE.sub("", terminal.end())
                assert terminal.process.returncode == 0, said
                assert "Traceback" not in said
            assert mlxsup(hub, home, "status").returncode == 0, "the daemon stays"
        finally:
            assert mlxsup(hub, home, "stop").returncode == 0


def test_run_of_a_name_needs_a_daemon(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "run", "smollm2")
    assert done.returncode == 69
    assert re.search(r"no daemon runs that serves smollm2\nhint: .*`mlxsup start", done.stderr)
    assert hub.asked == []


@pytest.mark.parametrize("called", [REPO, "m", "em"])
def test_run_starts_the_daemon_of_the_configuration_that_counts(
    hub: LocalHub, home: Path, called: str
) -> None:
    config = write_config(home)
    endpoint = f"ipc://{home}/other/client.sock"
    try:
        done = mlxsup(hub, home, "run", called, stdin="tell me\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout != ""
        assert contents(snapshot(home)) == NEEDED
        assert f"{REPO}: 0% of" in done.stderr, "downloaded where the progress is seen"
        assert re.search(r"\(pid \d+\); end it with `mlxsup stop`\n", done.stderr)
        status = status_at(endpoint)
        assert status["config_path"] == str(config)
        assert not (home / ".mlxsup" / "run").exists()
        again = mlxsup(hub, home, "run", called, "--json", stdin="more\n")
        assert again.returncode == 0, again.stderr
        assert json.loads(again.stdout)["model"] == "m"
        assert status_at(endpoint)["pid"] == status["pid"], "the same one serves"
    finally:
        assert mlxsup(hub, home, "stop").returncode == 0


def test_run_with_a_file_names_it_in_what_ends_the_daemon(hub: LocalHub, home: Path) -> None:
    given = ["--config", str(write_config(home, "given.toml"))]
    nowhere = f"ipc://{home}/nowhere/client.sock"
    try:
        done = mlxsup(hub, home, "run", "m", *given, stdin="tell me\n", MLXSUP_ENDPOINT=nowhere)
        assert done.returncode == 0, done.stderr
        assert f"end it with `mlxsup stop --config {home}/given.toml`" in done.stderr
    finally:
        assert mlxsup(hub, home, "stop", *given).returncode == 0


@pytest.mark.parametrize(
    ("called", "says"),
    [
        (
            OTHER,
            f"mlxsup.toml, which says what one serves, does not have {OTHER}\n"
            f'hint: add a table with repo = "{OTHER}" to it, then `mlxsup run {OTHER}`\n',
        ),
        ("n", "no model is called 'n'; configured: m\n"),
    ],
)
def test_run_of_what_the_configuration_does_not_have_begins_nothing(
    hub: LocalHub, home: Path, called: str, says: str
) -> None:
    write_config(home)
    done = mlxsup(hub, home, "run", called)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert hub.asked == []
    assert mlxsup(hub, home, "status").returncode == 69
    assert not (home / ".mlxsup").exists()


@pytest.mark.parametrize("source", ["MLXSUP_ENDPOINT", "--endpoint"])
def test_run_with_an_endpoint_where_nobody_answers_begins_nothing(
    hub: LocalHub, home: Path, source: str
) -> None:
    endpoint = f"ipc://{home}/nowhere/client.sock"
    options = ["--endpoint", endpoint] if source == "--endpoint" else []
    named = {} if options else {"MLXSUP_ENDPOINT": endpoint}
    done = mlxsup(hub, home, "run", REPO, *options, **named)
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr == (
        f"error: no daemon runs at {endpoint}, which {source} names\n"
        f"hint: start one there, or leave {source} out: then one is started that serves {REPO}\n"
    )
    assert hub.asked == []
    assert not (home / ".mlxsup").exists()


def test_a_daemon_with_a_file_is_given_another_model_by_that_file(
    hub: LocalHub, home: Path
) -> None:
    config = write_config(home)
    try:
        assert mlxsup(hub, home, "run", "m", stdin="tell me\n").returncode == 0
        done = mlxsup(hub, home, "run", OTHER)
        assert done.returncode == 1
        way = f'add a table with repo = "{OTHER}" to {config}, then `mlxsup reload`'
        assert done.stderr.endswith(f"hint: {way}\n")
    finally:
        assert mlxsup(hub, home, "stop").returncode == 0
