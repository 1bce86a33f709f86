"""`pull`, `rm` and `run`, with a hub on this machine, real daemons and played downloaders."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxsup.cli import downloading
from mlxsup.cli.downloading import progress_printer
from mlxsup.cli.exit_status import CliError
from mlxsup.cli.terminal.output import LiveLine, Output
from mlxsup.client import Client
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    Repository,
    report_line,
)
from mlxsup.protocol.folders import DEFAULT_LISTEN

from support.cli.cli import (
    ESCAPE,
    PROMPT,
    Piped,
    Terminal,
    check_plain,
    on_terminal,
    run_cli,
)
from support.daemon.daemon import fake, toml_of
from support.daemon.downloads import (
    FILES,
    HELD_AT,
    NEEDED,
    NEEDED_BYTES,
    REPO,
    TOKEN,
    WEIGHTS_NAME,
    contents,
    hub_environment,
    repo_folder,
    snapshot,
)
from support.daemon.hub_caches import write_repository
from support.daemon.local_hub import Fault, LocalHub, local_hub
from support.eventually import eventually
from support.gateway.json_schemas import problems
from support.models.tiny_model import make_tiny_model

OTHER = "org/other"


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as hub:
        hub.add(REPO, FILES)
        hub.add(OTHER, FILES)
        yield hub


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, which is the current one, too."""
    monkeypatch.chdir(folder)
    return folder


def variables(hub: LocalHub, home: Path, **others: str) -> dict[str, str]:
    """What a command gets in its environment."""
    return hub_environment(hub, home, **{"HOME": str(home), "HF_TOKEN": TOKEN, **others})


def mlxsup(
    hub: LocalHub, home: Path, *arguments: str, stdin: str = "", **others: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, in pipes; it shows no token, no escape byte and no traceback."""
    done = run_cli(*arguments, stdin=stdin, **variables(hub, home, **others))
    assert TOKEN not in done.stdout + done.stderr
    check_plain(done.stdout + done.stderr)
    return done


# ---------------------------------------------------------------- pull and rm


def test_pull_downloads_once_and_rm_removes(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "pull", REPO)
    assert (done.returncode, done.stdout) == (0, f"{snapshot(home)}\n")
    assert contents(snapshot(home)) == NEEDED
    *lines, last = done.stderr.splitlines()
    assert lines[0] == f"{REPO}: 0% of 4.1 MiB"
    assert len(lines) <= 11
    assert last == f"{REPO} is complete (4.1 MiB, 4.1 MiB downloaded)"
    shown = mlxsup(hub, home, "show", REPO, "--json")
    assert json.loads(shown.stdout)["licence"] == "apache-2.0"
    again = mlxsup(hub, home, "pull", REPO, "--json")
    assert (again.returncode, again.stderr, problems(again.stdout, ["pull"])) == (0, "", [])
    assert json.loads(again.stdout) == {
        "schema_version": 1,
        "repo": REPO,
        "revision": "main",
        "folder": str(snapshot(home)),
        "total_bytes": NEEDED_BYTES,
        "fetched_bytes": 0,
    }
    asked = list(hub.asked)
    offline = mlxsup(hub, home, "pull", REPO, HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, f"{snapshot(home)}\n")
    assert offline.stderr == f"{REPO} is complete (4.1 MiB, already downloaded)\n"
    assert hub.asked == asked

    kept = mlxsup(hub, home, "rm", REPO)
    assert (kept.returncode, f"{REPO} is not configured" in kept.stderr) == (1, True)
    assert f"`mlxsup rm --files {REPO}` deletes its files" in kept.stderr
    unsure = mlxsup(hub, home, "rm", "--files", REPO)
    assert (unsure.returncode, "hint: add --yes" in unsure.stderr) == (64, True)
    assert contents(snapshot(home)) == NEEDED
    removed = mlxsup(hub, home, "rm", "--files", REPO, "--yes")
    assert (removed.returncode, removed.stdout) == (
        0,
        f"deleted the files of {REPO}, which frees 4.1 MiB\n",
    )
    assert not repo_folder(home).exists()
    write_repository(home / "hf" / "hub", REPO)
    removed = mlxsup(hub, home, "rm", "--files", REPO, "--yes", "--json")
    assert (removed.returncode, removed.stderr, problems(removed.stdout, ["rm"])) == (0, "", [])
    missing = mlxsup(hub, home, "rm", "--files", REPO, "--yes")
    assert missing.returncode == 1
    assert f"{REPO} is not in {home}/hf/hub" in missing.stderr


def test_interrupted_pull_says_how_to_continue_and_holds_off_rm(hub: LocalHub, home: Path) -> None:
    hub.break_(WEIGHTS_NAME, Fault(hold_at=HELD_AT))
    config = home / ".mlxsup" / "config.toml"
    config.parent.mkdir(exist_ok=True)
    config.write_text(text := f'[models.m]\nrepo = "{REPO}"\n')
    with Piped("pull", REPO, **variables(hub, home)) as pulling:
        eventually(hub.held.is_set)
        for called in (REPO, "m"):
            refused = mlxsup(hub, home, "rm", "--files", called, "--yes")
            assert (refused.returncode, "is being downloaded" in refused.stderr) == (1, True)
        assert config.read_text() == text
        code, _, said = pulling.interrupt()
    assert code == 130
    assert f"Stopped. `mlxsup pull {REPO}` continues the download." in said


PLAYED = """
import os, sys
if "mlxsup.downloader" in sys.orig_argv:
    os.write(1, {said!r})
    {end}
"""


def played(folder: Path, *said: DownloadReport | str, end: str = "os._exit(1)") -> str:
    """A PYTHONPATH with which a download says this and ends."""
    lines = [one if isinstance(one, str) else report_line(one) for one in said]
    first = folder / "first"
    first.mkdir()
    text = "".join(f"{line}\n" for line in lines)
    (first / "sitecustomize.py").write_text(PLAYED.format(said=text.encode(), end=end))
    return os.pathsep.join([str(first), os.environ["PYTHONPATH"]])


CHECK = "check the network"
AGAIN = f"{CHECK}, then run `mlxsup pull {REPO} --revision v1` again; it continues where it stopped"


def test_a_downloader_that_ends_before_it_is_asked_is_no_reader_that_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Ended(subprocess.Popen[bytes]):
        """A process that has ended before anything is written to it."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.wait()

    monkeypatch.setattr(downloading, "download_argv", lambda: ["false"])
    monkeypatch.setattr("mlxsup.cli.downloading.subprocess.Popen", Ended)
    with pytest.raises(CliError, match="the download ended with exit code 1"):
        downloading.download(Repository(REPO), Output(), again="")


@pytest.mark.parametrize(
    ("problem", "status", "hint"),
    [
        (DownloadProblem.BAD_REPOSITORY, 64, CHECK),
        (DownloadProblem.NOT_FOUND, 1, CHECK),
        (DownloadProblem.DAMAGED, 1, CHECK),
        (DownloadProblem.NETWORK, 1, AGAIN),
        (DownloadProblem.DISK_FULL, 1, AGAIN),
        (DownloadProblem.UNWRITABLE, 1, AGAIN),
    ],
)
def test_failure_of_a_download_is_the_commands(
    hub: LocalHub, home: Path, problem: DownloadProblem, status: int, hint: str
) -> None:
    failed = DownloadFailed(problem=problem, message="no luck", hint=CHECK)
    paths = played(home, "noise", failed)
    done = mlxsup(hub, home, "pull", REPO, "--revision", "v1", PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"error: no luck\nhint: {hint}\n"
    done = mlxsup(hub, home, "pull", REPO, "--json", PYTHONPATH=paths)
    assert json.loads(done.stdout)["error"]["code"] == problem.value


@pytest.mark.parametrize(
    ("end", "how"), [("os._exit(3)", "exit code 3"), ("os.kill(os.getpid(), 9)", "signal 9")]
)
def test_last_words_of_a_dead_download_are_the_hint(
    hub: LocalHub, home: Path, end: str, how: str
) -> None:
    paths = played(home, "no library", "of that name", "", end=end)
    done = mlxsup(hub, home, "pull", REPO, PYTHONPATH=paths)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: the download ended with {how}\nhint: of that name\n"


# ---------------------------------------------------------------- search


def test_search_lists_what_fits_and_short_names_need_no_hub(hub: LocalHub, home: Path) -> None:
    hub.add("of--two/other", FILES)  # a name that the cache has no folder for
    found = json.loads(mlxsup(hub, home, "search", "OTHER", "--json").stdout)
    [one] = found["models"]
    assert (one["repo"], one["downloads"], one["fits"]) == (OTHER, 7, True)
    assert one["size_bytes"] == len(FILES[WEIGHTS_NAME]) // 2 * 2
    shown = mlxsup(hub, home, "search", "other")
    assert (OTHER in shown.stdout, f"`mlxsup run {OTHER}`" in shown.stderr) == (True, True)
    before = len(hub.asked)
    assert "mlx-community/Qwen3-4B-4bit" in mlxsup(hub, home, "search").stdout
    assert len(hub.asked) == before


SILENT_HUBS = {
    "offline": ({"HF_HUB_OFFLINE": "1"}, None, "HF_HUB_OFFLINE is set, so the hub is not asked"),
    "no hub": ({"HF_ENDPOINT": "http://127.0.0.1:9"}, None, "cannot reach http://127.0.0.1:9"),
    "an error": ({}, Fault(status=503), "answered the search with HTTP 503"),
    "limited": ({}, Fault(status=429, headers={"Retry-After": "9"}), "try again in 9 s"),
}


@pytest.mark.parametrize(("others", "fault", "says"), SILENT_HUBS.values(), ids=SILENT_HUBS)
def test_search_without_a_hub_is_a_sentence_about_the_search(
    hub: LocalHub, home: Path, others: dict[str, str], fault: Fault | None, says: str
) -> None:
    if fault is not None:
        hub.break_("/api/models", fault)
    done = mlxsup(hub, home, "search", "x", **others)
    assert (done.returncode, done.stdout, says in done.stderr) == (1, "", True)
    assert "download" not in done.stderr
    assert len(hub.asked) == (fault is not None), "nothing is tried again"


# ---------------------------------------------------------------- names of repositories


@pytest.mark.parametrize("repo", ["../../nowhere", "org/.."])
def test_name_of_no_repository_is_a_usage_error(hub: LocalHub, home: Path, repo: str) -> None:
    for words in (["pull"], ["rm", "--files"]):
        done = mlxsup(hub, home, *words, repo)
        assert (done.returncode, done.stdout) == (64, "")
        assert done.stderr.startswith(f"error: '{repo}' is not a repository such as ")
        assert done.stderr.endswith(
            "hint: a repository is written OWNER/NAME, such as mlx-community/Qwen3-4B-4bit\n"
        )
    error = json.loads(mlxsup(hub, home, "pull", repo, "--json").stdout)["error"]
    assert (error["code"], hub.asked) == ("usage", [])


def test_progress_off_a_terminal_is_a_line_for_each_tenth_and_each_wait(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with LiveLine(Output()) as line:
        show = progress_printer(Repository(REPO, "main"), line)
        show(DownloadProgress(is_waiting=True))
        for done in range(1001):
            show(DownloadProgress(done_bytes=done, total_bytes=1000))
    waiting, *lines = capsys.readouterr().err.splitlines()
    assert waiting == f"{REPO}: waiting for another process that downloads it"
    assert lines == [f"{REPO}: {tenth}0% of 1000 B".replace(" 00%", " 0%") for tenth in range(11)]


def test_speed_is_of_what_has_arrived_since_the_download_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter((10.0, 10.5, 12.0))
    monkeypatch.setattr("mlxsup.cli.downloading.time.monotonic", lambda: next(seconds))
    with LiveLine(Output()) as line:
        show = progress_printer(Repository(REPO, "main"), line)
        for done in (500, 600, 700):
            show(DownloadProgress(done_bytes=done, total_bytes=1000))
    assert capsys.readouterr().err.splitlines() == [
        f"{REPO}: 50% of 1000 B",
        f"{REPO}: 60% of 1000 B",
        f"{REPO}: 70% of 1000 B, 100 B/s, 3s left",
    ]


def test_progress_on_a_terminal_is_one_line_that_is_gone_at_the_end(
    hub: LocalHub, home: Path
) -> None:
    progress = [DownloadProgress(done_bytes=done, total_bytes=1000) for done in (0, 500)]
    done = DownloadDone(folder="/f", total_bytes=1000, fetched_bytes=1000)
    paths = played(home, *progress, done, end="os._exit(0)")
    text = on_terminal(["pull", REPO], **variables(hub, home, COLUMNS="24", PYTHONPATH=paths))
    *shown, last = ESCAPE.sub("", text).split("\r")
    drawn = [line for line in shown if "[" in line]
    assert drawn == ["[>           ] 0% of 1…", "[======>     ] 50% of …"]
    assert "%" not in last


def test_rm_asks_on_a_terminal_and_leaves_a_link_alone(hub: LocalHub, home: Path) -> None:
    write_repository(home / "hf" / "hub", REPO)
    for answer, is_kept in (("n\r", True), ("\r", True), ("y\r", False)):
        with Terminal("rm", "--files", REPO, **variables(hub, home)) as terminal:
            terminal.expect(f"delete the files of {REPO} (")
            terminal.type(answer)
            terminal.end()
            assert terminal.process.returncode == (1 if is_kept else 0)
        assert repo_folder(home).exists() == is_kept
    elsewhere = home / "elsewhere"
    elsewhere.mkdir()
    repo_folder(home).symlink_to(elsewhere)
    done = mlxsup(hub, home, "rm", "--files", REPO, "--yes", "--json")
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (1, "is_link")
    assert str(elsewhere) in error["message"]
    assert elsewhere.is_dir()


# ---------------------------------------------------------------- run


def write_config(home: Path, name: str = "mlxsup.toml", **more: Any) -> Path:
    """A configuration whose daemon is not at the default place, and has the model `m`."""
    places = {"runtime_dir": f"{home}/other", "log_dir": f"{home}/logs"}
    model = fake(repo=REPO, preload=False, aliases=["em"], **more)
    path = home / name
    short = {"max_tokens": 3}
    tables = {"supervisor": places, "models.m": model, "models.m.presets.short": short}
    path.write_text(toml_of(tables))
    return path


def status_at(endpoint: str) -> dict[str, Any]:
    with Client(endpoint) as client:
        return client.status()


SHORT = {"max_position_embeddings": 64}
"""A model without sense ends its answer only where its context does."""


@pytest.mark.mlx
def test_run_goes_from_nothing_to_an_answer_and_a_chat(home: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{home}/.mlxsup/run/client.sock"
    with local_hub() as hub:
        hub.add(REPO, contents(make_tiny_model(tmp_path / "m", seed=3, config=SHORT)))
        try:
            done = mlxsup(hub, home, "run", REPO, "--json", stdin="tell me\n")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["model"] == "tiny"
            assert status_at(endpoint)["gateway"]["address"] == DEFAULT_LISTEN
            assert hub.fetched(WEIGHTS_NAME) == [0]
            [served] = status_at(endpoint)["models"]
            assert served["repo"] == REPO
            with Terminal("run", REPO, **variables(hub, home)) as terminal:
                terminal.expect(PROMPT)
                terminal.type("tell me\r")
                terminal.expect(PROMPT)
                terminal.type("/exit\r")
                said = ESCAPE.sub("", terminal.end())
                assert terminal.process.returncode == 0, said
                assert "Traceback" not in said
            other = mlxsup(hub, home, "run", OTHER)
            assert other.returncode == 1
            assert (
                "org/other is not served yet\nhint: `mlxsup add org/other` adds it" in other.stderr
            )
            [after] = status_at(endpoint)["models"]
            assert (after["state"], after["generation"]) == ("READY", served["generation"])
        finally:
            assert mlxsup(hub, home, "stop").returncode == 0


def test_run_serves_what_the_configuration_has_and_rm_waits_for_unload(
    hub: LocalHub, home: Path
) -> None:
    config = write_config(home)
    endpoint = f"ipc://{home}/other/client.sock"
    for called in (OTHER, "n"):
        done = mlxsup(hub, home, "run", called)
        assert (done.returncode, done.stdout) == (1, "")
        says = f"{called} is not served yet\nhint: `mlxsup add {called}` adds it"
        assert says in done.stderr
    assert hub.asked == []
    assert mlxsup(hub, home, "status").returncode == 69
    try:
        done = mlxsup(hub, home, "run", REPO, stdin="tell me\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout != ""
        assert contents(snapshot(home)) == NEEDED
        assert f"{REPO}: 0% of" in done.stderr, "downloaded where the progress is seen"
        assert re.search(r"started a daemon \(pid \d+\); `mlxsup stop` ends it\n", done.stderr)
        status = status_at(endpoint)
        assert status["config_path"] == str(config)
        assert not (home / ".mlxsup" / "run").exists()
        for called, most, count in (("m", "4", 4), ("em:short", "2", 2), ("em:short", "", 3)):
            options = ["--max-tokens", most] if most else []
            again = mlxsup(hub, home, "run", called, "--json", *options, stdin="more\n")
            assert again.returncode == 0, again.stderr
            said = json.loads(again.stdout)
            assert (said["model"], said["usage"]["completion_tokens"]) == ("m", count)
        assert status_at(endpoint)["pid"] == status["pid"], "the same one serves"

        done = mlxsup(hub, home, "rm", "--files", REPO, "--yes")
        assert done.returncode == 1
        assert f"{REPO} is in use by m" in done.stderr
        assert "`mlxsup unload m" in done.stderr
        assert contents(snapshot(home)) == NEEDED
        assert mlxsup(hub, home, "unload", "m").returncode == 0
        removed = mlxsup(hub, home, "rm", "--files", REPO, "--yes")
        assert removed.returncode == 0
        assert "m is still configured: `mlxsup rm m` removes it" in removed.stderr
        assert not repo_folder(home).exists()
        # What is gone is downloaded again once the configuration was read again.
        assert mlxsup(hub, home, "reload").returncode == 0
        assert mlxsup(hub, home, "load", "m").returncode == 0
        assert contents(snapshot(home)) == NEEDED
    finally:
        assert mlxsup(hub, home, "stop").returncode == 0


def test_run_with_a_file_names_it_in_the_hints(hub: LocalHub, home: Path) -> None:
    config = write_config(home, "given.toml")
    given = ["--config", str(config)]
    write_repository(home / "hf" / "hub", REPO)
    nowhere = f"ipc://{home}/nowhere/client.sock"
    try:
        asked = ("run", "m:short", "--json", *given)
        wrong = mlxsup(hub, home, *asked, "--top-p", "7")
        assert (wrong.returncode, "--top-p must be" in wrong.stdout) == (64, True)
        assert mlxsup(hub, home, "status", *given).returncode == 69, "nothing was begun"
        done = mlxsup(hub, home, *asked[:2], *given, stdin="tell me\n", MLXSUP_ENDPOINT=nowhere)
        assert done.returncode == 0, done.stderr
        assert f"`mlxsup stop --config {home}/given.toml` ends it" in done.stderr
        done = mlxsup(hub, home, "run", OTHER, *given)
        assert done.returncode == 1
        assert f"hint: `mlxsup add {OTHER} --config {config}` adds it" in done.stderr
    finally:
        assert mlxsup(hub, home, "stop", *given).returncode == 0


def test_run_without_a_daemon_to_ask_begins_nothing(hub: LocalHub, home: Path) -> None:
    done = mlxsup(hub, home, "run", "nothing")
    assert done.returncode == 1
    says = "there is no model 'nothing' on this machine\nhint: `mlxsup search "
    assert says in done.stderr
    endpoint = f"ipc://{home}/nowhere/client.sock"
    for source in ("MLXSUP_ENDPOINT", "--endpoint"):
        options = ["--endpoint", endpoint] if source == "--endpoint" else []
        named = {} if options else {"MLXSUP_ENDPOINT": endpoint}
        done = mlxsup(hub, home, "run", REPO, *options, **named)
        assert (done.returncode, done.stdout) == (69, "")
        assert done.stderr == (
            f"error: no daemon runs at {endpoint}, which {source} names\nhint: start one there,"
            f" or run this without {source} to start one that serves {REPO}\n"
        )
    assert hub.asked == []
    assert not (home / ".mlxsup").exists()
