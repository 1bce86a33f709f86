"""Frames of a group, the calls that ranks repeat, and what the ranks must agree on; no process."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsup.cli import host_checks
from mlxsup.protocol.codec import DecodeError
from mlxsup.protocol.group import HostReport, has_no_mlxsup
from mlxsup.protocol.ids import RequestKey
from mlxsup.protocol.launch import GroupHost, LaunchSettings
from mlxsup.protocol.parameters import Sampling
from mlxsup.protocol.states import Batching, FinishReason
from mlxsup.worker.engine import (
    BadLaunchError,
    EngineFacts,
    NoDeviceError,
    Row,
    RowPrefill,
    RowSetAside,
    RowToken,
    StepResult,
)
from mlxsup.worker.engines.mlx.folder import NESTED
from mlxsup.worker.engines.mlx.ranks import identify_folder, take_share
from mlxsup.worker.group import inspection
from mlxsup.worker.group.followers import place_on_host
from mlxsup.worker.group.frames import (
    PING,
    TO_FOLLOWER,
    Beat,
    Call,
    FrameError,
    FrameReader,
    FrameWriter,
    Plan,
    Stop,
    pack_frame,
    plain_row,
)
from mlxsup.worker.group.replay import Replay

from support.models.tiny_model import make_tiny_model
from support.worker.turn_bench import A, B

ROW = Row(
    key=RequestKey(7),
    tokens=[5, 6, 7],
    max_tokens=9,
    seed=2**63,
    sampling=Sampling(temperature=0.5, top_k=3),
    delivered=[8],
    logit_bias={3: -1.5, 4: 2.0},
    stop_token_ids=(1, 2),
    ignore_eos=True,
    prompt_logprobs=2,
    checkpoints=(1,),
    lengths=(3,),
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            pass  # the test has closed it


def test_frames_arrive_in_order_with_pings_between_them(pipe: tuple[int, int]) -> None:
    reader, writer = FrameReader(pipe[0], TO_FOLLOWER), FrameWriter(pipe[1])
    call = Call(number=1, name="step", digest=2**32 - 1)
    messages = (Plan(rank=1, addresses=["127.0.0.1:1"], backend="ring"), call, Stop())
    for message in messages:
        writer.ping()
        writer.write(message)
        assert reader.read() is None
        assert reader.read() == message
    os.write(pipe[1], b"abc")
    heard = reader.heard()
    assert heard == len(b"abc") + sum(len(pack_frame(one)) + len(PING) for one in messages)
    os.close(pipe[1])
    with pytest.raises(EOFError):
        reader.read()


def test_a_ping_waits_for_no_room(pipe: tuple[int, int]) -> None:
    """A rank that reads nothing must not stop the thread that notices such ranks."""
    os.set_blocking(pipe[1], False)
    while select.select([], [pipe[1]], [], 0)[1]:
        os.write(pipe[1], bytes(4096))
    os.set_blocking(pipe[1], True)
    pinging = threading.Thread(target=FrameWriter(pipe[1]).ping, daemon=True)
    pinging.start()
    pinging.join(10.0)
    assert not pinging.is_alive()


def test_what_is_no_frame_of_this_direction_is_refused(pipe: tuple[int, int]) -> None:
    reader, writer = FrameReader(pipe[0], TO_FOLLOWER), FrameWriter(pipe[1])
    writer.write(Beat(heard=0, begun=1, ended=0, available_bytes=0))
    with pytest.raises(DecodeError, match="unknown type 'beat'"):
        reader.read()
    os.write(pipe[1], b"\x7f\xff\xff\xff")
    with pytest.raises(FrameError, match="at most"):
        reader.read()


def test_a_row_arrives_as_it_was_sent_but_for_what_the_leader_keeps(pipe: tuple[int, int]) -> None:
    reader, writer = FrameReader(pipe[0], TO_FOLLOWER), FrameWriter(pipe[1])
    asked = replace(ROW, top_logprobs=3)
    writer.write(Call(number=1, name="insert", digest=0, row=plain_row(asked)))
    writer.write(Call(number=2, name="set_aside", digest=0, keys=[A, B], named={"keep": True}))
    inserted, taken_out = reader.read(), reader.read()
    assert isinstance(inserted, Call)
    assert (inserted.arguments(), inserted.named) == ([ROW], {})
    assert isinstance(taken_out, Call)
    assert (taken_out.arguments(), taken_out.named) == ([A, B], {"keep": True})


FACTS = EngineFacts(context_length=100, vocabulary_size=50, fingerprint="f", backend="fake")
TOKEN = RowToken(key=A, token=5)
READ = RowPrefill(key=A, done=4, total=9)
ASIDE = RowSetAside(key=A, token=TOKEN)


def digest_of(*results: object, facts: EngineFacts = FACTS, constrains: bool = False) -> int:
    """Return the digest after an insert, which may be of a row with a grammar, and these results
    of later calls."""
    engine: Any = SimpleNamespace(insert=lambda row: 0)
    replay = Replay(engine, facts)
    replay.make("insert", [replace(ROW, key=A)], {}, is_constrained=constrains)
    for result in results:
        engine.step = engine.set_aside = lambda *keys, result=result: result
        is_step = isinstance(result, StepResult)
        replay.make("step" if is_step else "set_aside", [] if is_step else [A], {})
    assert replay.number == 1 + len(results)
    return replay.digest


@pytest.mark.parametrize(
    "other",
    [
        StepResult(),
        StepResult(tokens=[TOKEN, TOKEN], prefill=[READ]),
        StepResult(tokens=[RowToken(key=B, token=5)], prefill=[READ]),
        StepResult(tokens=[RowToken(key=A, token=6)], prefill=[READ]),
        StepResult(tokens=[RowToken(key=A, token=5, finish=FinishReason.STOP)], prefill=[READ]),
        StepResult(tokens=[RowToken(key=A, token=5, ended_by=5)], prefill=[READ]),
        StepResult(tokens=[RowToken(key=A, token=5, vector=b"v")], prefill=[READ]),
        StepResult(tokens=[TOKEN], prefill=[replace(READ, done=5)]),
        StepResult(tokens=[TOKEN], prefill=[replace(READ, total=8)]),
        StepResult(tokens=[TOKEN], prefill=[replace(READ, known=1)]),
    ],
)
def test_a_step_with_another_result_has_another_digest(other: StepResult) -> None:
    alike = StepResult(tokens=[TOKEN], prefill=[READ])
    assert digest_of(alike) == digest_of(replace(alike, took_s=1.0))
    assert digest_of(alike) != digest_of(other)


@pytest.mark.parametrize(
    "other",
    [
        replace(ASIDE, is_kept=True),
        replace(ASIDE, token=RowToken(key=A, token=6)),
        RowSetAside(key=A),
    ],
)
def test_a_row_that_is_set_aside_otherwise_has_another_digest(other: RowSetAside) -> None:
    assert digest_of([ASIDE]) == digest_of([replace(ASIDE)])
    assert digest_of([ASIDE]) != digest_of([other])


@pytest.mark.parametrize(
    "change",
    [{"context_length": 99}, {"vocabulary_size": 49}, {"batching": Batching.SERIAL_PREFILL}],
)
def test_a_load_that_finds_something_else_has_another_digest(change: dict[str, Any]) -> None:
    assert digest_of() == digest_of(facts=replace(FACTS, fingerprint="g"))
    assert digest_of() != digest_of(facts=replace(FACTS, **change))


def test_tokens_of_a_row_with_a_grammar_count_in_no_digest_while_it_runs() -> None:
    """Only the leader sees its grammar end it."""
    ended = StepResult(tokens=[RowToken(key=A, token=5, finish=FinishReason.STOP)])
    goes_on = StepResult(tokens=[TOKEN])
    assert digest_of(ended, constrains=True) == digest_of(goes_on, constrains=True)
    last = [replace(ASIDE, token=RowToken(key=A, token=5, finish=FinishReason.STOP))]
    kept = [replace(ASIDE, is_kept=True)]
    assert digest_of(last, constrains=True) == digest_of(kept, constrains=True)
    gone: list[object] = [RowSetAside(key=A)]
    assert digest_of(gone, ended, constrains=True) != digest_of(gone, goes_on, constrains=True)


def test_the_fingerprint_of_a_folder_is_that_of_its_copy_and_of_no_other(tmp_path: Path) -> None:
    first = identify_folder(make_tiny_model(tmp_path / "a"))
    copy = make_tiny_model(tmp_path / "b")
    os.utime(copy / "model.safetensors", (0, 0))
    assert identify_folder(copy) == first
    assert identify_folder(make_tiny_model(tmp_path / "c", seed=1)) != first
    assert identify_folder(make_tiny_model(tmp_path / "d", config={"rope_theta": 5.0})) != first


@pytest.mark.parametrize("within", ["", *NESTED])
def test_a_size_that_the_hosts_cannot_divide_is_named(within: str) -> None:
    """Models of pictures and text have those of the text in a table of its own."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2}
    config = {"model_type": "x", **(sizes if not within else {within: sizes})}
    folder: Any = SimpleNamespace(path=Path("/m"), config=config)
    ranks: Any = SimpleNamespace(size=lambda: 3)
    shared = SimpleNamespace(shard=lambda ranks: None)
    with pytest.raises(BadLaunchError, match="num_key_value_heads is 2, which 3 hosts cannot"):
        take_share(shared, folder, ranks, parallel="auto", backend="ring")


def test_a_host_reports_its_first_problem(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Neither the folder nor the address is its own."""
    assert inspection.main(["mlx", str(tmp_path / "gone"), "192.0.2.1", "auto", "2"]) == 0
    report = json.loads(capfdbinary.readouterr().out)
    assert report["problem"] == f"the model folder {tmp_path}/gone does not exist"


def test_a_host_without_mlx_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    folder = make_tiny_model(tmp_path / "a")
    monkeypatch.setattr("mlxsup.worker.engines.mlx.ranks.version", missing)
    with pytest.raises(NoDeviceError, match=r"has no mlx; install the same on every host"):
        identify_folder(folder)


def test_each_rank_of_a_machine_has_a_gpu_of_its_own() -> None:
    here, there = GroupHost(), GroupHost(ssh="there")
    hosts = [here, there, here, there, here]
    assert [place_on_host(hosts, rank) for rank in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("ssh", "code", "printed", "problem"),
    [
        ("far", 255, b"no route\n", "no route; `ssh far` must work without a question"),
        ("far", 255, b"", "ssh fails; `ssh far` must work without a question"),
        ("far", 1, b"a line\nits disk is gone\n", "its disk is gone"),
        ("", 255, b"its disk is gone\n", "its disk is gone"),
        ("", 3, b"", "no answer, exit code 3"),
    ],
)
def test_what_a_silent_host_has_printed_is_its_problem_and_ssh_is_named_if_that_has_failed(
    ssh: str, code: int, printed: bytes, problem: str
) -> None:
    process: Any = SimpleNamespace(stderr=io.BytesIO(printed), wait=lambda: code)
    assert host_checks._silence(process, GroupHost(ssh=ssh, address="a")) == problem


def test_hosts_check_names_what_a_host_has_otherwise_than_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = HostReport(
        python="3.13", versions={"mlx": "1"}, available_bytes=1, fingerprint="f", problem="", port=1
    )
    reports = {
        "": first, "same": first, "bare": replace(first, versions={}),
        "other-files": replace(first, fingerprint="g"),
        "old": replace(first, versions={"mlx": "0"}), "bad": replace(first, problem="no device"),
    }  # fmt: skip
    monkeypatch.setattr(
        host_checks,
        "ask",
        lambda launch, host, size: host_checks.Answer(reports[host.ssh].problem, reports[host.ssh]),
    )
    hosts = tuple(GroupHost(ssh=name, address="a") for name in reports)
    found = host_checks.look_at([("m", LaunchSettings(hosts=hosts))])
    assert [one["problem"] for one in found] == [
        None,
        None,
        "it has mlx None, not 1; install the same on every host",
        "it has other model files than the first host; copy the folder there again",
        "it has mlx 0, not 1; install the same on every host",
        "no device",
    ]
    reports = {"": replace(first, fingerprint="", problem="no files"), "same": first}
    hosts = tuple(GroupHost(ssh=name, address="a") for name in reports)
    found = host_checks.look_at([("m", LaunchSettings(hosts=hosts))])
    assert [one["problem"] for one in found] == ["no files", None]
    reports = {"a": first, "b": replace(first, fingerprint="g")}
    groups = [(name, LaunchSettings(hosts=(GroupHost(ssh=name, address="a"),))) for name in reports]
    assert [one["problem"] for one in host_checks.look_at(groups)] == [None, None], "two models"


@pytest.mark.parametrize(
    ("code", "last_line", "has_none"),
    [
        (127, "sh: python3: not found", True),
        (126, "sh: python3: Permission denied", True),
        (2, "Unknown option: -P", True),
        (1, "python3: No module named mlxsup", True),
        (1, "MemoryError", False),
        (0, "", False),
    ],
)
def test_host_that_cannot_run_mlxsup_is_told_from_one_whose_process_failed(
    code: int, last_line: str, has_none: bool
) -> None:
    assert has_no_mlxsup(code, last_line) is has_none


def test_a_host_is_asked_about_its_own_folder_or_else_that_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def refuse(command: list[str], **_: object) -> None:
        asked.append(command)
        raise OSError(errno.ENOENT, "no such program")

    monkeypatch.setattr("subprocess.Popen", refuse)
    for path, expected in (("/own", "/own"), ("", "/models/m")):
        host = GroupHost(ssh="", address="a", path=path)
        answer = host_checks.ask(LaunchSettings(path="/models/m"), host, 1)
        assert answer.problem.endswith("cannot be run: no such program")
        assert {"/own", "/models/m"} & {*asked[-1]} == {expected}
