"""Launches of workers, gateways and downloads, and the reports of downloads."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.downloader import __main__ as downloader
from mlxsup.protocol.codec import MAX_LINE_BYTES, read_line, to_line
from mlxsup.protocol.download import (
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    DownloadSpec,
    Repository,
    download_argv,
    read_report,
    report_line,
)
from mlxsup.protocol.gateway import (
    Address,
    GatewayRules,
    GatewaySpec,
    gateway_argv,
    is_local_origin,
    is_loopback,
)
from mlxsup.protocol.ids import Generation, ModelName
from mlxsup.protocol.launch import (
    LaunchSettings,
    LaunchSpec,
    worker_argv,
)

LAUNCH = LaunchSpec(
    model=ModelName("m"),
    generation=Generation(1),
    token="t",
    endpoint="ipc:///x",
    supervisor_pid=1,
    engine="fake",
    path="/x",
    max_concurrency=4,
    step_timeout_s=30.0,
    decode_stall_target_ms=250,
)


def test_launch_is_the_settings_and_one_life() -> None:
    marks: dict[str, Any] = {f.name: f.name for f in dataclasses.fields(LaunchSettings)}
    spec = LaunchSpec.of(
        LaunchSettings(**marks),
        model=ModelName("m"),
        generation=Generation(1),
        token="t",
        endpoint="ipc:///x",
        supervisor_pid=1,
    )
    assert {name: getattr(spec, name) for name in marks} == marks
    assert (spec.model, spec.log_level) == ("m", "info")


def test_processes_start_without_the_working_folder() -> None:
    assert worker_argv("py") == ["py", "-P", "-m", "mlxsup.worker"]
    assert gateway_argv("py") == ["py", "-P", "-m", "mlxsup.gateway"]
    assert download_argv("py") == ["py", "-P", "-m", "mlxsup.downloader"]
    assert download_argv()[0] == sys.executable


# ---------------------------------------------------------------- specs as lines

GATEWAY = GatewaySpec(
    endpoint="ipc:///run/client.sock", host="::1", port=8484, listener=5, beat_pipe=6,
    key_file="/c.keys.json", key_mark="/run/mark", has_had_keys=True,
    log_level="debug",
    rules=GatewayRules(
        names={"gpt-*": "m", "x": "m:warm"}, hosts=("ai.example",),
        origins=("https://chat.example",), needs_keys=True, refuses_unread=True,
    ),
)  # fmt: skip
DOWNLOAD = DownloadSpec(repository=Repository("a/b", "v1"))
SEARCH = DownloadSpec(words="q w")


@pytest.mark.parametrize("spec", [LAUNCH, GATEWAY, DOWNLOAD, SEARCH])
def test_a_spec_is_read_as_it_was_written(spec: object) -> None:
    line = to_line(spec)
    assert (line.count(b"\n"), read_line(type(spec), line, "a spec")) == (1, spec)


NO_LINE = "a spec must be one line of JSON of at most 64 KiB"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", NO_LINE),
        (b"{", NO_LINE),
        (b"[]\n", NO_LINE),
        (b"[" * 20_000, NO_LINE),
        (b"\xff", NO_LINE),
        (b" " * MAX_LINE_BYTES + to_line(DOWNLOAD), NO_LINE),
        (b'{"words":7}\n', "a spec is wrong: words must be text"),
        (b'{"repository":{}}\n', "a spec is wrong: the field repository.repo is missing"),
        (b'{"x":1}\n', "a spec is wrong: unknown field x; known are repository, words"),
    ],
)  # fmt: skip
def test_another_line_is_refused_with_what_is_wrong(line: bytes, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(problem)}$"):
        read_line(DownloadSpec, line, "a spec")


# ---------------------------------------------------------------- the gateway


@pytest.mark.parametrize(
    ("text", "shown", "is_ours"),
    [
        ("127.9.9.9:1", "127.9.9.9:1", True),
        ("localhost:80", "127.0.0.1:80", True),
        ("[::1]:8484", "[::1]:8484", True),
        ("127.0.0.1:0", "127.0.0.1:0", True),
        ("127.0.0.1:65535", "127.0.0.1:65535", True),
        ("0.0.0.0:8484", "0.0.0.0:8484", False),
        ("[::]:8484", "[::]:8484", False),
        ("192.168.1.5:80", "192.168.1.5:80", False),
        ("8.8.8.8:80", "8.8.8.8:80", False),
        ("8500", "127.0.0.1:8500", True),
        (":8500", "127.0.0.1:8500", True),
    ],
)
def test_address_is_known_as_this_machine_or_for_others(
    text: str, shown: str, is_ours: bool
) -> None:
    address = Address.parse(text)
    assert str(address) == shown
    assert is_loopback(address.host) is is_ours


@pytest.mark.parametrize(
    "text",
    ["", ":", "x", "127.0.0.1", "[::1]", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:65536", "a.b:80",
     "127.0.0.1:-1", "127.0.0.1:٣", "http://127.0.0.1:80", "127.0.0.1:123456"],
)  # fmt: skip
def test_text_that_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address of this machine and a port"):
        Address.parse(text)


OURS = (
    "http://localhost:3000", "http://localhost", "https://127.0.0.1", "http://127.3.0.1:8",
    "http://[::1]:8", "tauri://localhost", "http://a.localhost:80",
)  # fmt: skip
OTHERS = (
    "", "null", "localhost", "https://ai.example", "http://localhost.evil.example",
    "http://10.0.0.1", "http://127.0.0.1.evil.example", "http://[2001:db8::1]", "app://-",
    "http://evil:80", "http://alocalhost",
)  # fmt: skip


def test_origins_of_this_machine_are_told_from_others() -> None:
    assert [one for one in (*OURS, *OTHERS) if is_local_origin(one)] == list(OURS)


# ---------------------------------------------------------------- downloads


def test_a_repository_is_shown_with_a_revision_other_than_main() -> None:
    assert (str(Repository("a/b")), str(Repository("a/b", "v1"))) == ("a/b", "a/b at v1")


@pytest.mark.parametrize(
    ("report", "values"),
    [
        (DownloadProgress(done_bytes=3, total_bytes=9, is_waiting=True),
         {"mlxsup_download": "progress", "done_bytes": 3, "total_bytes": 9, "is_waiting": True}),
        (DownloadDone(folder="/f", total_bytes=9, fetched_bytes=4),
         {"mlxsup_download": "done", "folder": "/f", "total_bytes": 9, "fetched_bytes": 4}),
        (DownloadFailed(problem=DownloadProblem.RATE_LIMITED, message="m", hint="h",
                        retry_after_s=2.5),
         {"mlxsup_download": "failed", "problem": "rate_limited", "message": "m", "hint": "h",
          "retry_after_s": 2.5}),
    ],
)  # fmt: skip
def test_download_report_is_one_line(report: DownloadReport, values: dict[str, object]) -> None:
    line = report_line(report)
    assert json.loads(line) == values
    assert "\n" not in line
    found = read_report(line.encode())
    assert found == report
    if isinstance(found, DownloadFailed):
        assert isinstance(found.problem, DownloadProblem)
    short = b'{"mlxsup_download": "failed", "problem": "gated", "message": "m"}'
    assert read_report(short) == DownloadFailed(problem=DownloadProblem.GATED, message="m")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"Fetching 4 files",
        b"[]",
        b"3",
        b'{"done_bytes": 3}',
        b'{"mlxsup_download": "begun"}',
        b'{"mlxsup_download": "done", "folder": "/f"}',
        b'{"mlxsup_download": "progress", "speed": 3}',
        b'{"mlxsup_download": "failed", "problem": "new", "message": "m"}',
        b"[" * 20_000,
        b"\xff",
    ],
)
def test_other_lines_are_no_report(line: bytes) -> None:
    assert read_report(line) is None


WAITS = {DownloadProblem.NETWORK: "the network", DownloadProblem.RATE_LIMITED: "the hub"}


@pytest.mark.parametrize("problem", DownloadProblem)
def test_outages_and_faults_of_a_download_pass(problem: DownloadProblem) -> None:
    failed = DownloadFailed(problem=problem, message="m")
    assert failed.waits_for == WAITS.get(problem, "")
    assert failed.is_passing is (problem in WAITS or problem is DownloadProblem.INTERNAL)


@pytest.mark.parametrize(
    ("listens", "opens"),
    [
        ("0.0.0.0:1", "http://127.0.0.1:1"),
        ("[::]:1", "http://[::1]:1"),
        ("10.0.0.7:1", "http://10.0.0.7:1"),
    ],
)
def test_the_url_of_an_address_opens_on_this_machine(listens: str, opens: str) -> None:
    address = Address.parse(listens)
    assert (str(address), address.url) == (listens, opens)


def test_a_download_leaves_an_interrupt_of_the_terminal_to_its_parent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"no spec\n")))
    before = signal.getsignal(signal.SIGINT)
    try:
        assert downloader.run() == downloader.BAD_SPEC_EXIT
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
