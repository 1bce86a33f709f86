"""Launches of workers, gateways and downloads, and the reports of downloads."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest

from mlxsup.protocol.download import (
    MAX_SPEC_BYTES,
    DownloadDone,
    DownloadFailed,
    DownloadProblem,
    DownloadProgress,
    DownloadReport,
    DownloadSpec,
    Repository,
    Search,
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
    MAX_LAUNCH_SPEC_BYTES,
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
    settings = {f.name: getattr(LAUNCH, f.name) for f in dataclasses.fields(LaunchSettings)}
    others = {
        f.name: getattr(LAUNCH, f.name)
        for f in dataclasses.fields(LAUNCH)
        if f.name not in settings
    }
    assert LaunchSpec.of(LaunchSettings(**settings), **others) == LAUNCH


def test_launch_is_one_line() -> None:
    line = LAUNCH.to_line()
    assert line.count(b"\n") == 1
    assert LaunchSpec.from_line(line) == LAUNCH
    assert MAX_LAUNCH_SPEC_BYTES == 65536, "as the message says"
    at_most = dataclasses.replace(LAUNCH, token="t" * (MAX_LAUNCH_SPEC_BYTES - len(line) + 1))
    assert LaunchSpec.from_line(at_most.to_line()) == at_most
    for wrong in (line[:-1], dataclasses.replace(at_most, path="/xx").to_line()):
        with pytest.raises(
            ValueError, match=r"^a launch spec is one line of JSON of at most 64 KiB$"
        ):
            LaunchSpec.from_line(wrong)
    for keys in (b"[]\n", b"{}\n", line.replace(b'"token"', b'"tokens"')):
        with pytest.raises(
            ValueError, match=r"^a launch spec has exactly the keys adapters, cache_limit"
        ):
            LaunchSpec.from_line(keys)
    with pytest.raises(ValueError, match=r"^a launch spec is nested less deeply$"):
        LaunchSpec.from_line(b"[" * (MAX_LAUNCH_SPEC_BYTES - 1) + b"\n")


def test_processes_start_without_the_working_folder() -> None:
    assert worker_argv("py") == ["py", "-P", "-m", "mlxsup.worker"]
    assert gateway_argv("py") == ["py", "-P", "-m", "mlxsup.gateway"]
    assert download_argv("py") == ["py", "-P", "-m", "mlxsup.downloader"]
    assert download_argv()[0] == sys.executable


# ---------------------------------------------------------------- the gateway

GATEWAY = GatewaySpec(
    endpoint="ipc:///run/client.sock", host="::1", port=8484, listener=5, beat_pipe=6,
    supervisor_pid=7, key_file="/c.keys.json", key_mark="/run/mark", has_had_keys=True,
    log_level="debug",
    rules=GatewayRules(
        names=(("gpt-*", "m"), ("x", "m:warm")), hosts=("ai.example",),
        origins=("https://chat.example",), needs_keys=True, refuses_unread=True,
    ),
)  # fmt: skip


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


def test_gateway_spec_is_read_as_it_was_written() -> None:
    line = GATEWAY.to_line()
    assert (line.count(b"\n"), GatewaySpec.from_line(line)) == (1, GATEWAY)


@pytest.mark.parametrize(
    "line", [b"", b"{}\n", b"[]\n", GATEWAY.to_line()[:-1], b"x" * 70_000 + b"\n"]
)
def test_line_that_is_no_gateway_spec_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match="a gateway's spec"):
        GatewaySpec.from_line(line)


OURS = (
    "http://localhost:3000", "http://localhost", "https://127.0.0.1", "http://127.3.0.1:8",
    "http://[::1]:8", "tauri://localhost", "http://a.localhost:80",
)  # fmt: skip
OTHERS = (
    "", "null", "localhost", "https://ai.example", "http://localhost.evil.example",
    "http://10.0.0.1", "http://127.0.0.1.evil.example", "http://[2001:db8::1]", "app://-",
    "http://evil:80", "http://alocalhost",
)  # fmt: skip


@pytest.mark.parametrize("origin", [*OURS, *OTHERS])
def test_origin_is_known_as_this_machine_or_another(origin: str) -> None:
    assert is_local_origin(origin) is (origin in OURS)


# ---------------------------------------------------------------- downloads

DOWNLOAD = DownloadSpec(work=Repository("a/b", "v1"), parent_pid=7)

WORDS = "a download spec is one line of JSON"


def test_download_spec_is_one_line() -> None:
    line = DOWNLOAD.to_line()
    assert line == b'{"work":{"repo":"a/b","revision":"v1"},"parent_pid":7}\n'
    assert DownloadSpec.from_line(line) == DOWNLOAD
    search = DownloadSpec(work=Search("q w"), parent_pid=7)
    assert DownloadSpec.from_line(search.to_line()) == search
    longest = line.rstrip().rjust(MAX_SPEC_BYTES)
    assert DownloadSpec.from_line(longest) == DOWNLOAD


def test_revision_is_main_by_default() -> None:
    assert DownloadSpec.from_line(b'{"work": {"repo": "a/b"}, "parent_pid": "7"}') == (
        DownloadSpec(work=Repository("a/b", "main"), parent_pid=7)
    )
    assert (str(Repository("a/b")), str(Repository("a/b", "v1"))) == ("a/b", "a/b at v1")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b'{"parent_pid": 7}',
        b'{"work": {"repo": "a/b"}}',
        b'{"work": {"name": "a/b"}, "parent_pid": 7}',
        b'{"work": {"repo": "a/b"}, "parent_pid": "x"}',
        b"[" * 20_000,
        b" " * MAX_SPEC_BYTES + DOWNLOAD.to_line(),
    ],
)
def test_line_that_is_no_download_spec_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=f"^{WORDS}$"):
        DownloadSpec.from_line(line)


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
