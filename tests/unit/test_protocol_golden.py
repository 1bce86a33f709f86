"""The bytes of every message, so that a change of the wire cannot happen unseen.

When a message changes on purpose, raise PROTOCOL_VERSION if older peers would misread it, run
`python tests/unit/test_protocol_golden.py` to write the new bytes, and read the difference.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from mlxsup.protocol import client_messages, worker_messages
from mlxsup.protocol.cache_layers import CacheLayers
from mlxsup.protocol.client_messages import (
    Attach,
    CancelRequest,
    PauseRequest,
    RequestsQuery,
    ResumeRequest,
)
from mlxsup.protocol.codec import Decoder, encode
from mlxsup.protocol.delta import DeltaBody, pack_body
from mlxsup.protocol.errors import ErrorCode, RemoteError
from mlxsup.protocol.ids import Generation, ModelName, RequestId, RequestKey, pack_tokens
from mlxsup.protocol.message import Message
from mlxsup.protocol.states import (
    Batching,
    Channel,
    FinishReason,
    LoadPhase,
    NoticeKind,
    Priority,
    WorkerPhase,
)
from mlxsup.protocol.step_batch import PackedRow
from mlxsup.protocol.worker_messages import LogLevel, Render, Rendered

GOLDEN = Path(__file__).with_name("golden_messages.json")

CONTENT = Channel.CONTENT
ID = RequestId("r-1")
MODEL = ModelName("smollm2")
KEY = RequestKey(7)
ERROR = RemoteError(ErrorCode.UNKNOWN_MODEL, "no such model", detail={"known": ["a"]})

LINKS: dict[str, tuple[tuple[type[Message], ...], list[Message]]] = {
    "client to supervisor": (
        client_messages.CLIENT_MESSAGES,
        [
            client_messages.Generate(
                id=ID,
                model=MODEL,
                client="me",
                priority=Priority.BATCH,
                queue_timeout_s=1.5,
                timeout_s=60.0,
                body=b"\x80",
            ),
            client_messages.Cancel(id=ID),
            client_messages.Prioritize(
                id=ID, request=RequestId("r-0"), priority=Priority.INTERACTIVE
            ),
            client_messages.Ping(id=ID),
            client_messages.StatusQuery(id=ID),
            client_messages.Load(id=ID, model=MODEL),
            client_messages.Unload(id=ID, model=MODEL),
            client_messages.Restart(id=ID, model=MODEL, now=True),
            PauseRequest(id=ID, request=RequestId("x-7")),
            ResumeRequest(id=ID, request=RequestId("x-7")),
            RequestsQuery(id=ID, client="team"),
            CancelRequest(id=ID, request=RequestId("x-7")),
            Attach(id=ID, request=RequestId("#7")),
            client_messages.Stop(id=ID, now=True, timeout_s=2.0),
            client_messages.Subscribe(id=ID),
            client_messages.Reload(id=ID),
            client_messages.AddModel(id=ID, model="org/m", name="m", revision="v2"),
            client_messages.RemoveModel(id=ID, model=MODEL),
            client_messages.Configure(id=ID, changes={"defaults.preload": "true", "a": None}),
            client_messages.SettingsQuery(id=ID, model=MODEL),
        ],
    ),
    "supervisor to client": (
        client_messages.SUPERVISOR_TO_CLIENT,
        [
            client_messages.Deltas(
                deltas=[
                    client_messages.ClientDelta(
                        id=ID,
                        seq=3,
                        tokens=pack_tokens([1, 70000]),
                        body=pack_body(DeltaBody(text="héé", channel=Channel.REASONING)),
                    )
                ]
            ),
            client_messages.Notice(
                id=ID, kind=NoticeKind.QUEUED, detail={"position": 3, "reason": "rows"}
            ),
            client_messages.Done(
                id=ID,
                seq=4,
                finish_reason=FinishReason.STOP,
                usage=client_messages.Usage(prompt_tokens=3, completion_tokens=4, engine_s=0.5),
                timings=client_messages.Timings(queued_s=0.25, total_s=2.0),
                seed=11,
            ),
            client_messages.Failed(id=ID, error=ERROR),
            client_messages.Reply(id=ID, value={"model": {"name": "smollm2"}}),
            client_messages.Event(id=ID, value={"model": "smollm2", "to": "READY"}),
            client_messages.Alive(),
        ],
    ),
    "supervisor to worker": (
        worker_messages.SUPERVISOR_TO_WORKER,
        [
            worker_messages.Dispatch(
                key=KEY,
                resume=worker_messages.Resume(
                    acceptance=worker_messages.Acceptance(
                        prompt_tokens=pack_tokens([1, 2]),
                        opening="<think>",
                        parameters={"max_tokens": 9},
                        seed=5,
                        fingerprint="f",
                    ),
                    delivered=pack_tokens([3]),
                    shown=4,
                ),
            ),
            worker_messages.CancelRow(key=KEY),
            worker_messages.PauseRow(key=KEY, keep=True),
            worker_messages.DropKept(key=KEY),
            Render(
                number=2,
                opening="<think>",
                parameters={"max_tokens": 9},
                seed=5,
                fingerprint="f",
                delivered=pack_tokens([3]),
            ),
            worker_messages.Leases(are_needed=True),
            worker_messages.Lease(),
            worker_messages.SetBudget(number=3, rows_bytes=1 << 33, gives_back=True),
            worker_messages.GiveBack(),
            LogLevel(level="debug"),
            worker_messages.Exit(),
        ],
    ),
    "worker to supervisor": (
        worker_messages.WORKER_TO_SUPERVISOR,
        [
            worker_messages.Hello(
                model=MODEL, generation=Generation(2), token="t", pid=99, version="0.1.0"
            ),
            worker_messages.LoadProgress(phase=LoadPhase.WEIGHTS, progress=0.5),
            worker_messages.Ready(
                context_length=8192,
                fingerprint="ab",
                backend="cpu",
                versions={"mlx": "0.32.4"},
                active_bytes=5,
                own_bytes=7,
                cache_layers=[
                    CacheLayers(layers=3, token_bytes=64),
                    CacheLayers(layers=2, token_bytes=32, row_bytes=16, window=128),
                ],
                batching=Batching.ONE_ROW,
                batching_reason="rows of different length change each other",
                warnings=["its context length is not declared"],
            ),
            worker_messages.Accepted(
                key=KEY,
                acceptance=worker_messages.Acceptance(
                    prompt_tokens=pack_tokens([1, 2]),
                    opening="",
                    parameters={"temperature": 0.5},
                    seed=11,
                    fingerprint="ab",
                ),
                tokenize_s=0.25,
            ),
            worker_messages.Rejected(key=KEY, error=ERROR),
            worker_messages.Step(
                step=9,
                rows=[
                    PackedRow(
                        key=KEY, tokens=pack_tokens([5]), body=pack_body(DeltaBody(text="x"))
                    ),
                    PackedRow(
                        key=KEY,
                        body=pack_body(DeltaBody(text="x", channel=Channel.PROMPT)),
                        is_prompt=True,
                    ),
                    PackedRow(key=KEY, finish=FinishReason.LENGTH),
                ],
                prefill=[
                    worker_messages.PrefillProgress(
                        key=RequestKey(8), done=16, total=600, computed=16
                    )
                ],
                took_s=0.25,
                decode_s=0.125,
                between_steps=1,
                reads_on=True,
                returns_lease=True,
                wants_lease=True,
                only_waits=True,
            ),
            Rendered(number=2, bodies=[pack_body(DeltaBody(text="h", channel=Channel.REASONING))]),
            worker_messages.Heartbeat(
                step=9, phase=WorkerPhase.DECODE, phase_s=0.5, active_bytes=5
            ),
            worker_messages.Dying(code=70, message="step failed"),
        ],
    ),
}

EXAMPLES = [
    pytest.param(link, message, id=f"{link}: {message.TYPE}")
    for link, (_, examples) in LINKS.items()
    for message in examples
]


def frames_of(message: Message) -> list[str]:
    return [frame.hex() for frame in encode(message)]


@pytest.mark.parametrize("link", LINKS)
def test_messages_have_slots_and_share_their_methods(link: str) -> None:
    for cls in LINKS[link][0]:
        slots = [name for base in reversed(cls.__mro__) for name in vars(base).get("__slots__", ())]
        assert slots == [f.name for f in fields(cls)]  # type: ignore[arg-type]
        assert "__dict__" not in dir(cls)
        assert not {"__eq__", "__repr__", "__hash__"} & vars(cls).keys()


def test_messages_are_equal_by_all_their_fields() -> None:
    one, other = (client_messages.Ping(id=RequestId(name)) for name in "ab")
    assert one == client_messages.Ping(id=RequestId("a"))
    assert one != other
    assert repr(one) == "Ping(id='a', v=2)"


@pytest.mark.parametrize("link", LINKS)
def test_every_message_has_an_example(link: str) -> None:
    classes, examples = LINKS[link]
    assert [type(example) for example in examples] == list(classes)


@pytest.mark.parametrize(("link", "message"), EXAMPLES)
def test_bytes_of_a_message_are_what_they_were_and_decode_to_it(
    link: str, message: Message
) -> None:
    assert frames_of(message) == json.loads(GOLDEN.read_text())[link][message.TYPE]
    assert Decoder(LINKS[link][0], is_strict=False).decode(encode(message)) == message


if __name__ == "__main__":
    golden = {
        link: {message.TYPE: frames_of(message) for message in examples}
        for link, (_, examples) in LINKS.items()
    }
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
